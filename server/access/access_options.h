// Files that say who may do what.
#ifndef BALLAST_SERVER_ACCESS_ACCESS_OPTIONS_H_
#define BALLAST_SERVER_ACCESS_ACCESS_OPTIONS_H_

#include <string>

namespace ballast::server {

// All are paths, and empty where there is none. They are read again when they change.
struct AccessOptions {
  // Addresses of TCP speak TLS, with this certificate (a chain in the form of PEM) and its key.
  std::string tls_certificate;
  std::string tls_key;
  // Clients have certificates that these authorities have signed. With tokens they may have none.
  std::string tls_client_ca;
  // Of policy.h. Without roles every caller is an operator of all jobs.
  std::string roles;
  std::string tokens;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_ACCESS_ACCESS_OPTIONS_H_
