#include "client/transport/handshake.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ballast::client {

std::string WhyHandshakeFailed(const grpc::Status& status, const Credentials& credentials) {
  // What the service itself says has details. The rest are gRPC's words, and OpenSSL's in them.
  if (status.ok() || !status.error_details().empty()) return "";
  const auto said = [&](const char* words) {
    return absl::StrContains(status.error_message(), words);
  };
  const std::string own = credentials.tls_cert.empty() ? "--tls-cert" : credentials.tls_cert;
  if (said("certificate verify failed")) {
    return absl::StrCat("its certificate is not of the authority in ", credentials.tls_ca,
                        ", or has expired; give with --tls-ca the authority that has signed it");
  }
  if (said("Hostname Verification")) {
    return absl::StrCat("its certificate, of the authority in ", credentials.tls_ca,
                        ", is of another host name; call it by a name that the certificate has");
  }
  if (said("wrong version number")) {
    return absl::StrCat("what listens there does not speak TLS; give no --tls-ca (",
                        credentials.tls_ca, "), or correct the address");
  }
  if (said("alert certificate required")) {
    return "it wants a certificate of this client; give --tls-cert and --tls-key";
  }
  if (said("alert certificate expired")) {
    return absl::StrCat("this client's certificate, ", own, ", has expired; renew it");
  }
  if (said("alert unknown ca") || said("alert bad certificate")) {
    return absl::StrCat("it does not know the authority of this client's certificate, ", own,
                        "; give one that an authority of its --tls-client-ca has signed");
  }
  return "";
}

}  // namespace ballast::client
