// Files that define who may do what.
#ifndef BALLAST_SERVER_ACCESS_ACCESS_OPTIONS_H_
#define BALLAST_SERVER_ACCESS_ACCESS_OPTIONS_H_

#include <string>

namespace ballast::server {

// All are paths; empty: not used. They are read again when they change.
struct AccessOptions {
  // TCP addresses use TLS with this certificate (a PEM chain) and its key.
  std::string tls_certificate;
  std::string tls_key;
  // The authorities of client certificates. With tokens a client certificate is optional.
  std::string tls_client_ca;
  // The format is in policy.h. Without roles every caller is an operator of all jobs.
  std::string roles;
  std::string tokens;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_ACCESS_ACCESS_OPTIONS_H_
