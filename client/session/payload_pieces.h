// A payload in the pieces in which it arrived: their size, and copying them together.
#ifndef BALLAST_CLIENT_SESSION_PAYLOAD_PIECES_H_
#define BALLAST_CLIENT_SESSION_PAYLOAD_PIECES_H_

#include <cstddef>
#include <cstring>

#include "client/transport/transport.h"

namespace ballast::client {

inline size_t TotalBytes(PayloadPieces pieces) {
  size_t bytes = 0;
  for (absl::Span<const std::byte> piece : pieces) bytes += piece.size();
  return bytes;
}

// `out` has room for all pieces. A piece that is already in place is not copied.
inline void CopyPieces(PayloadPieces pieces, std::byte* out) {
  for (absl::Span<const std::byte> piece : pieces) {
    if (!piece.empty() && piece.data() != out) std::memcpy(out, piece.data(), piece.size());
    out += piece.size();
  }
}

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_PAYLOAD_PIECES_H_
