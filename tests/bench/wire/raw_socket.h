// Blocking stream sockets on the loopback, for the wire without gRPC.
//
// A transfer begins with two numbers, the messages up and down; after both the peer sends a byte.
#ifndef BALLAST_TESTS_BENCH_WIRE_RAW_SOCKET_H_
#define BALLAST_TESTS_BENCH_WIRE_RAW_SOCKET_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "tests/bench/wire/wire.h"

namespace ballast::bench {

struct TransferSizes {
  int64_t up = 0;
  int64_t down = 0;
  int64_t buffer_bytes = 0;  // Of the peer's socket; 0: as it is.
};
inline constexpr std::byte kTransferDone{'k'};

// "127.0.0.1:PORT", where port 0 is one that the system chooses, or "unix:/path".
absl::StatusOr<int> ListenRaw(const std::string& address);
absl::StatusOr<std::string> AddressOfRaw(int listener);  // Of TCP.
absl::StatusOr<int> ConnectRaw(const std::string& address);
absl::StatusOr<int> AcceptRaw(int listener);
// Calls that make no progress for kWireLimitSeconds fail.
absl::Status LimitWaits(int fd);
// Of the system's own buffers, as much as it allows.
void SetBuffers(int fd, int bytes);

absl::Status SendAll(int fd, absl::Span<const std::byte> bytes);
// False: the peer has closed the connection, and nothing was received.
absl::StatusOr<bool> ReceiveAll(int fd, absl::Span<std::byte> bytes);

absl::Status SendMessages(int fd, const SendMemory& memory, int64_t count);
// Into a buffer that stays warm.
absl::Status ReceiveMessages(int fd, int64_t count);

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_WIRE_RAW_SOCKET_H_
