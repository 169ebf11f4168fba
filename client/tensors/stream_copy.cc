#include "client/tensors/stream_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ballast::client {

#if defined(__SSE2__)

namespace {

// Less stays in the caches, where it is soon found.
constexpr size_t kLeastBytes = size_t{64} << 10;
constexpr size_t kLineBytes = 64;

}  // namespace

void StreamCopy(void* to, const void* from, size_t bytes) {
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
  if (bytes >= kLeastBytes) {
    // The streaming stores need aligned places, and go out best as whole lines of the cache.
    const size_t head = -reinterpret_cast<uintptr_t>(out) % kLineBytes;
    std::memcpy(out, in, head);
    out += head, in += head, bytes -= head;
    for (; bytes >= kLineBytes; out += kLineBytes, in += kLineBytes, bytes -= kLineBytes) {
      const auto* line = reinterpret_cast<const __m128i*>(in);
      auto* place = reinterpret_cast<__m128i*>(out);
      const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
      const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
      _mm_stream_si128(place, a);
      _mm_stream_si128(place + 1, b);
      _mm_stream_si128(place + 2, c);
      _mm_stream_si128(place + 3, d);
    }
    _mm_sfence();  // Such stores are otherwise not in order with the message that tells of them.
  }
  std::memcpy(out, in, bytes);
}

#else

void StreamCopy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

#endif

}  // namespace ballast::client
