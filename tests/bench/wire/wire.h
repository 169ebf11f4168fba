// What wire_bench compares: ways to move messages of a chunk's size between two processes.
#ifndef BALLAST_TESTS_BENCH_WIRE_WIRE_H_
#define BALLAST_TESTS_BENCH_WIRE_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ballast::bench {

inline constexpr int64_t kMessageBytes = 512 << 10;  // A chunk of bf16.

// How long anything may take before the other end counts as stuck.
inline constexpr int kWireLimitSeconds = 60;

// What is sent lies in memory, as gradients and weights do: too much for the caches, written once.
// Constant, and so thread-safe.
class SendMemory {
 public:
  SendMemory();
  absl::Span<const std::byte> message(int64_t index) const {
    return absl::MakeConstSpan(memory_.get() + index % kMessages * kMessageBytes, kMessageBytes);
  }

 private:
  static constexpr int64_t kMessages = 256;
  const std::unique_ptr<std::byte[]> memory_;
};

// One connection to the peer. For one thread.
class Wire {
 public:
  virtual ~Wire() = default;
  // Sends `up` messages and receives `down` at the same time; returns when the peer has said that
  // all is done.
  virtual absl::Status Transfer(int64_t up, int64_t down) = 0;
};

// To the peer's raw socket, at a port of the loopback or a path. `buffer_bytes`: of the sockets'
// own buffers, at both ends; 0: as the system has them.
absl::StatusOr<std::unique_ptr<Wire>> OpenRawWire(const std::string& address,
                                                  const SendMemory& memory, int buffer_bytes);
// To its gRPC server: the client's own stream, with messages of the project's protocol.
absl::StatusOr<std::unique_ptr<Wire>> OpenGrpcWire(const std::string& address,
                                                   const SendMemory& memory);

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_WIRE_WIRE_H_
