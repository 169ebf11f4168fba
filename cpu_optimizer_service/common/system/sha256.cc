#include "cpu_optimizer_service/common/system/sha256.h"

#include <openssl/err.h>
#include <openssl/evp.h>

#include <new>

#include "absl/strings/escaping.h"

namespace ballast {
namespace {

// Every OpenSSL has this digest, and its calls come in order here: only memory can be missing.
void NeedsMemory(bool done) {
  if (done) return;
  // TLS on this thread would take an error that is left for its own.
  ERR_clear_error();
  throw std::bad_alloc();
}

}  // namespace

void Sha256::Free::operator()(evp_md_ctx_st* context) const { EVP_MD_CTX_free(context); }

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  NeedsMemory(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
}

void Sha256::Add(absl::Span<const std::byte> bytes) {
  NeedsMemory(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1);
}

void Sha256::Add(absl::string_view text) {
  NeedsMemory(EVP_DigestUpdate(context_.get(), text.data(), text.size()) == 1);
}

std::string Sha256::Hex() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  NeedsMemory(EVP_DigestFinal_ex(context_.get(), digest, &size) == 1);
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(digest), size));
}

}  // namespace ballast
