#include "cpu_optimizer_service/common/system/credential_files.h"

#include <fcntl.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <memory>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "cpu_optimizer_service/common/system/openssl_pointers.h"

namespace ballast {
namespace {

// Even a bundle of all public authorities has less. A file that is no credential is not read whole.
constexpr size_t kMostBytes = size_t{1} << 20;

using openssl::Bytes;
using openssl::Certificate;
using openssl::Key;

absl::Status Wrong(const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, " ", what));
}

Bytes BytesOf(const std::string& contents) {
  return Bytes(BIO_new_mem_buf(contents.data(), static_cast<int>(contents.size())));
}

std::string Text(const ASN1_TIME* time) {
  const Bytes text(BIO_new(BIO_s_mem()));
  char* begin = nullptr;
  if (ASN1_TIME_print(text.get(), time) != 1) return "an unknown time";
  const long bytes = BIO_get_mem_data(text.get(), &begin);  // NOLINT: OpenSSL's type.
  return std::string(begin, static_cast<size_t>(bytes));
}

// Of the time of now: OK if the certificate is valid.
absl::Status CheckTimes(const Certificate& certificate, const std::string& path) {
  const ASN1_TIME* const begin = X509_get0_notBefore(certificate.get());
  const ASN1_TIME* const end = X509_get0_notAfter(certificate.get());
  const int begins = X509_cmp_current_time(begin);
  const int ends = X509_cmp_current_time(end);
  // 0 says that the time cannot be read. Of such a certificate nobody knows whether it is valid.
  if (begins == 0 || ends == 0) {
    return Wrong(path, "is a certificate with an unreadable time of validity; create it again");
  }
  if (begins > 0) {
    return Wrong(path, absl::StrCat("is a certificate that is not valid before ", Text(begin),
                                    "; check this host's clock"));
  }
  if (ends > 0) return absl::OkStatus();
  return Wrong(path, absl::StrCat("is a certificate that expired at ", Text(end), "; renew it"));
}

// 0: it says nothing that can be read.
int64_t ExpiryOf(const Certificate& certificate) {
  tm time = {};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(certificate.get()), &time) != 1) return 0;
  // The time is in UTC. mktime would take it as local time.
  return timegm(&time);
}

std::vector<Certificate> CertificatesIn(const std::string& contents) {
  const Bytes bytes = BytesOf(contents);
  std::vector<Certificate> found;
  // What is no certificate is passed over, such as a key in the same file.
  while (X509* one = PEM_read_bio_X509(bytes.get(), nullptr, nullptr, nullptr)) {
    found.emplace_back(one);
  }
  ERR_clear_error();  // The last one was not there.
  return found;
}

// A key with a passphrase is none here: no person is there to type it.
int NoPassphrase(char*, int, int, void*) { return 0; }

}  // namespace

absl::StatusOr<std::string> ReadCredentialFile(const std::string& path, Others others) {
  // Without O_NONBLOCK the open of a pipe would wait for a writer. All checks are made of the file
  // that is open: its name may lead to another one a moment later.
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status = {};
  if (!file || fstat(file.number(), &status) != 0) {
    return Wrong(path, absl::StrCat("cannot be read: ", std::strerror(errno)));
  }
  if (!S_ISREG(status.st_mode)) return Wrong(path, "is not a regular file");
  // The owner may read and replace it, whatever its mode. Kubernetes' are root's.
  if (others == Others::kMayDoNothing && status.st_uid != 0 && status.st_uid != geteuid()) {
    return Wrong(path,
                 absl::StrCat("belongs to user ", status.st_uid,
                              "; it must belong to this user or to root: run chown ", geteuid()));
  }
  if (others == Others::kMayDoNothing && (status.st_mode & S_IRWXO) != 0) {
    return Wrong(path,
                 "can be read by other users; run chmod o= (in Kubernetes: defaultMode 0440)");
  }
  // Whoever can write the file can put another key, authority or token there, so this counts for
  // all files.
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return Wrong(path, "can be written by other users; run chmod go-w");
  }
  // The size that fstat has told is not used, since the file may grow meanwhile. One byte more than
  // is allowed shows that it is too large.
  std::string contents(kMostBytes + 1, '\0');
  size_t bytes = 0;
  while (bytes < contents.size()) {
    const ssize_t more = read(file.number(), contents.data() + bytes, contents.size() - bytes);
    if (more < 0 && errno == EINTR) continue;
    if (more < 0) return Wrong(path, absl::StrCat("cannot be read: ", std::strerror(errno)));
    if (more == 0) break;
    bytes += static_cast<size_t>(more);
  }
  if (bytes > kMostBytes) return Wrong(path, "is larger than 1 MiB");
  contents.resize(bytes);
  return contents;
}

absl::StatusOr<KeyPair> ReadKeyPair(const std::string& certificate, const std::string& key) {
  BALLAST_ASSIGN_OR_RETURN(const std::string chain,
                           ReadCredentialFile(certificate, Others::kMayRead));
  const std::vector<Certificate> certificates = CertificatesIn(chain);
  if (certificates.empty()) return Wrong(certificate, "has no PEM certificate");
  // The first certificate is this side's own. Those behind it are of the authorities in between.
  BALLAST_RETURN_IF_ERROR(CheckTimes(certificates.front(), certificate));

  BALLAST_ASSIGN_OR_RETURN(const std::string secret,
                           ReadCredentialFile(key, Others::kMayDoNothing));
  const Bytes bytes = BytesOf(secret);
  const Key private_key(PEM_read_bio_PrivateKey(bytes.get(), nullptr, NoPassphrase, nullptr));
  // OpenSSL keeps errors for each thread. TLS on this thread would take one that is left for its
  // own.
  ERR_clear_error();
  if (private_key == nullptr) {
    return Wrong(key, "has no PEM private key without a passphrase");
  }
  const bool match = X509_check_private_key(certificates.front().get(), private_key.get()) == 1;
  ERR_clear_error();
  if (match) {
    return KeyPair{.certificate = chain,
                   .key = secret,
                   .expires_unix_seconds = ExpiryOf(certificates.front())};
  }
  return Wrong(key, absl::StrCat("does not match the certificate in ", certificate,
                                 "; give the key of that certificate"));
}

absl::StatusOr<std::string> ReadCertificateAuthority(const std::string& path) {
  BALLAST_ASSIGN_OR_RETURN(const std::string contents, ReadCredentialFile(path, Others::kMayRead));
  const std::vector<Certificate> certificates = CertificatesIn(contents);
  if (certificates.empty()) return Wrong(path, "has no PEM certificate");
  // One is enough: while authorities are exchanged a file has the old one beside the new one.
  for (const Certificate& each : certificates) {
    if (CheckTimes(each, path).ok()) return contents;
  }
  return CheckTimes(certificates.front(), path);
}

absl::StatusOr<std::string> ReadTokenFile(const std::string& path) {
  BALLAST_ASSIGN_OR_RETURN(const std::string contents,
                           ReadCredentialFile(path, Others::kMayDoNothing));
  // Editors and echo end a file with a newline.
  const absl::string_view token = absl::StripAsciiWhitespace(contents);
  if (token.empty()) return Wrong(path, "is empty; write the token into it");
  // The token is sent as a header of HTTP/2, which has to be printable ASCII.
  if (!std::all_of(token.begin(), token.end(), absl::ascii_isgraph)) {
    return Wrong(path, "must hold one token of letters, digits and signs");
  }
  return std::string(token);
}

}  // namespace ballast
