// CRC-32 as zlib, gzip and PNG have it (RFC 1952, section 8), about as fast as memory is read. It
// finds accidents, and nothing that is made on purpose.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_CRC32_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_CRC32_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace ballast {

// `crc` is that of the bytes before these; 0 where there are none.
uint32_t Crc32(uint32_t crc, absl::Span<const std::byte> bytes);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_CRC32_H_
