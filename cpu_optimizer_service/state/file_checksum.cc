#include "cpu_optimizer_service/state/file_checksum.h"

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/kernels/crc32.h"

namespace ballast {

const char* Name(ChecksumKind kind) { return kind == ChecksumKind::kCrc32 ? "crc32" : "sha256"; }

FileChecksum::FileChecksum(ChecksumKind kind)
    : sha256_(kind == ChecksumKind::kSha256 ? std::make_unique<Sha256>() : nullptr) {}

void FileChecksum::Add(absl::Span<const std::byte> bytes) {
  if (sha256_ != nullptr) return sha256_->Add(bytes);
  crc32_ = Crc32(crc32_, bytes);
}

Checksum FileChecksum::Result() {
  if (sha256_ != nullptr) return {.kind = ChecksumKind::kSha256, .hex = sha256_->Hex()};
  return {.kind = ChecksumKind::kCrc32, .hex = absl::StrCat(absl::Hex(crc32_, absl::kZeroPad8))};
}

}  // namespace ballast
