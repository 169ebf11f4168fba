#include "client/c_api/self_signed.h"

#include <openssl/bio.h>
#include <openssl/bn.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/openssl_pointers.h"

namespace ballast::client {
namespace {

using openssl::Bytes;
using openssl::Certificate;
using openssl::Freed;
using openssl::Key;
using Address = std::unique_ptr<ASN1_OCTET_STRING, Freed<ASN1_OCTET_STRING_free>>;
using Extension = std::unique_ptr<X509_EXTENSION, Freed<X509_EXTENSION_free>>;
using Number = std::unique_ptr<BIGNUM, Freed<BN_free>>;

// The clocks of two hosts may differ.
constexpr long kBeginSeconds = -24 * 3600;  // NOLINT: OpenSSL's type.
// "No well-defined expiration date" (RFC 5280, 4.1.2.5).
constexpr char kEnd[] = "99991231235959Z";
constexpr int kSerialBits = 127;

std::string TextOf(BIO* bytes) {
  char* begin = nullptr;
  const long size = BIO_get_mem_data(bytes, &begin);  // NOLINT: OpenSSL's type.
  return std::string(begin, static_cast<size_t>(size));
}

bool Add(X509* certificate, int number, const std::string& value) {
  const Extension made(X509V3_EXT_conf_nid(nullptr, nullptr, number, value.c_str()));
  return made != nullptr && X509_add_ext(certificate, made.get(), -1) == 1;
}

bool Fill(X509* certificate, EVP_PKEY* key, const std::string& host) {
  const Number serial(BN_new());
  X509_NAME* const name = X509_get_subject_name(certificate);
  return serial != nullptr && X509_set_version(certificate, X509_VERSION_3) == 1 &&
         BN_rand(serial.get(), kSerialBits, BN_RAND_TOP_ANY, BN_RAND_BOTTOM_ANY) == 1 &&
         BN_to_ASN1_INTEGER(serial.get(), X509_get_serialNumber(certificate)) != nullptr &&
         X509_gmtime_adj(X509_getm_notBefore(certificate), kBeginSeconds) != nullptr &&
         ASN1_TIME_set_string(X509_getm_notAfter(certificate), kEnd) == 1 &&
         X509_set_pubkey(certificate, key) == 1 &&
         X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_UTF8,
                                    reinterpret_cast<const unsigned char*>(host.c_str()), -1, -1,
                                    0) == 1 &&
         X509_set_issuer_name(certificate, name) == 1 &&
         Add(certificate, NID_basic_constraints, "critical,CA:FALSE") &&
         Add(certificate, NID_subject_alt_name, absl::StrCat("IP:", host)) &&
         X509_sign(certificate, key, EVP_sha256()) > 0;
}

}  // namespace

absl::StatusOr<Identity> MakeIdentity(const std::string& host) {
  const Address address(a2i_IPADDRESS(host.c_str()));
  ERR_clear_error();
  if (address == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("'", host, "' is not an IP address; give one"));
  }
  const Key key(EVP_EC_gen("P-256"));
  const Certificate certificate(X509_new());
  const Bytes certificate_text(BIO_new(BIO_s_mem()));
  const Bytes key_text(BIO_new(BIO_s_mem()));
  if (key == nullptr || certificate == nullptr || certificate_text == nullptr ||
      key_text == nullptr || !Fill(certificate.get(), key.get(), host) ||
      PEM_write_bio_X509(certificate_text.get(), certificate.get()) != 1 ||
      PEM_write_bio_PrivateKey(key_text.get(), key.get(), nullptr, nullptr, 0, nullptr, nullptr) !=
          1) {
    ERR_clear_error();
    return absl::InternalError("OpenSSL cannot make a certificate");
  }
  return Identity{.certificate = TextOf(certificate_text.get()), .key = TextOf(key_text.get())};
}

}  // namespace ballast::client
