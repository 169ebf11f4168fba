#include "cpu_optimizer_service/common/system/sha256.h"

#include <openssl/evp.h>

#include "absl/strings/escaping.h"

namespace ballast {

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  EVP_DigestInit_ex(context_, EVP_sha256(), nullptr);
}
Sha256::~Sha256() { EVP_MD_CTX_free(context_); }

void Sha256::Add(absl::Span<const std::byte> bytes) {
  EVP_DigestUpdate(context_, bytes.data(), bytes.size());
}

void Sha256::Add(absl::string_view text) { EVP_DigestUpdate(context_, text.data(), text.size()); }

std::string Sha256::Hex() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  EVP_DigestFinal_ex(context_, digest, &size);
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(digest), size));
}

}  // namespace ballast
