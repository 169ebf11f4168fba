// Files of certificates, keys and tokens: finds errors in them before they are used.
//
// Each error is one INVALID_ARGUMENT line that names the file and says what to do.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_CREDENTIAL_FILES_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_CREDENTIAL_FILES_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ballast {

enum class Others : uint8_t {
  kMayRead,       // And may not write.
  kMayDoNothing,  // The file's group may read it, others may not. Its owner is this user or root.
};

// The contents of a regular file of at most 1 MiB that only its owner may write.
absl::StatusOr<std::string> ReadCredentialFile(const std::string& path, Others others);

struct KeyPair {
  std::string certificate;  // A chain.
  std::string key;
  int64_t expires_unix_seconds = 0;  // The first certificate's.
};
// The contents of two files. One begins with a certificate that is valid now. The other has its
// key, and other users cannot read it.
absl::StatusOr<KeyPair> ReadKeyPair(const std::string& certificate, const std::string& key);

// The contents of a file with certificates, at least one of which is valid now.
absl::StatusOr<std::string> ReadCertificateAuthority(const std::string& path);

// The token in a file that other users cannot read: one word, without surrounding blanks.
absl::StatusOr<std::string> ReadTokenFile(const std::string& path);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_CREDENTIAL_FILES_H_
