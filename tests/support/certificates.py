"""Certificates, keys, tokens and roles for tests, made with Debian's openssl where they are needed."""

import hashlib
import pathlib
import subprocess


def _openssl(*words):
    done = subprocess.run(["openssl", *(str(word) for word in words)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"openssl {words[0]} failed: {done.stderr.strip()}")


def private(path: pathlib.Path, contents: str) -> pathlib.Path:
    """A file that only this user may read, there in one piece."""
    made = path.with_name(path.name + ".new")
    made.touch(0o600)
    made.write_text(contents, encoding="utf-8")
    made.rename(path)
    return path


class Authority:
    """folder/NAME.pem signs certificates of localhost and 127.0.0.1."""

    def __init__(self, folder: pathlib.Path, name: str = "ca"):
        self.folder, self.certificate = folder, folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        _openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", 2,
                 "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.certificate)

    def issue(self, name: str, address: str = "127.0.0.1", hosts: tuple[str, ...] = ("localhost",)) -> tuple[
            pathlib.Path, pathlib.Path]:
        """The paths of a certificate of this common name, for services on these hosts and at this IP address, and of its
        key."""
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        request, extension = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        names = [*(f"DNS:{host}" for host in hosts), f"IP:{address}"]
        extension.write_text(f"subjectAltName={','.join(names)}", encoding="ascii")
        _openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
                 "-keyout", key, "-out", request)
        _openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial",
                 "-days", 2, "-extfile", extension, "-out", certificate)
        key.chmod(0o600)
        return certificate, key


class Guarded:
    """What a service needs that speaks TLS and asks who calls: `flags`, and the `environment` of a client whose
    token has `role` for `jobs`."""

    def __init__(self, folder: pathlib.Path, role: str = "operator", jobs: str = "*"):
        self.folder, self.authority = folder, Authority(folder)
        certificate, key = self.authority.issue("service")
        self.token, self.tokens = private(folder / "token", "a-token-of-a-test\n"), folder / "tokens"
        self.roles = private(folder / "roles", f"{role} {jobs} token:test\n")
        self.know("test")
        self.flags = [f"--tls-cert={certificate}", f"--tls-key={key}", f"--tls-client-ca={self.authority.certificate}",
                      f"--roles-file={self.roles}", f"--tokens-file={self.tokens}"]
        self.environment = {"BALLAST_TLS_CA": str(self.authority.certificate), "BALLAST_TOKEN_FILE": str(self.token)}

    def know(self, *names: str) -> None:
        """The tokens of these names, and no others: all are the one of the test."""
        digest = hashlib.sha256(self.token.read_text().strip().encode()).hexdigest()
        private(self.tokens, "".join(f"{name} {digest}\n" for name in names))
