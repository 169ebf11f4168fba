// The checksum of one of a checkpoint's files, over all of its bytes in order. CRC-32 since format 3
// of the index; before that SHA-256, which takes five times as long. Both find damage; neither is
// a signature.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_FILE_CHECKSUM_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_FILE_CHECKSUM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/system/sha256.h"

namespace ballast {

enum class ChecksumKind : uint8_t { kCrc32, kSha256 };

// As the index calls it.
const char* Name(ChecksumKind kind);

struct Checksum {
  ChecksumKind kind = ChecksumKind::kCrc32;
  std::string hex;  // Lower case: 8 digits, or 64.
  bool operator==(const Checksum&) const = default;
};

class FileChecksum {
 public:
  explicit FileChecksum(ChecksumKind kind);

  void Add(absl::Span<const std::byte> bytes);
  Checksum Result();  // Once, at the end.

 private:
  std::unique_ptr<Sha256> sha256_;  // Null for a CRC-32.
  uint32_t crc32_ = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_FILE_CHECKSUM_H_
