"""Where a service's status page is, and what is there."""

import http.client
import re
import ssl
import urllib.parse

from processes import await_, read


def status_address(service):
    """Of a Service that was started with --metrics-listen."""
    found = await_("the status page's address",
                   lambda: re.search(r"status page at (https?://\S+)/,", read(service.log)), service.process)
    return found[1]


def trusting(authority=None, certificate=None):
    """What a client of TLS takes: services' certificates that `authority` has signed, and shows: (certificate, key)."""
    context = ssl.create_default_context(cafile=authority)
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context


def get(url, method="GET", headers=None, seconds=30, tls=None):
    """The status code, the text and the headers of the answer."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=seconds, context=tls or trusting())
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)
    try:
        connection.request(method, parts.path + (f"?{parts.query}" if parts.query else ""), headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()
