// The little of TCP that ranks need to find each other: an owned socket, and whole reads and writes
// with a deadline.
#ifndef BALLAST_GPU_WORKER_COLLECTIVE_SOCKET_H_
#define BALLAST_GPU_WORKER_COLLECTIVE_SOCKET_H_

#include <chrono>
#include <cstddef>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ballast::worker {

using Deadline = std::chrono::steady_clock::time_point;

// Whether a numeric address reaches only this host.
bool IsLoopback(const std::string& host);

class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Socket();

  // Listens on `host`:`port`; port 0 takes a free one. UNAVAILABLE if the port is taken.
  static absl::StatusOr<Socket> Listen(const std::string& host, int port);
  // Tries until something answers at `host`:`port` or the deadline passes (DEADLINE_EXCEEDED).
  static absl::StatusOr<Socket> Connect(const std::string& host, int port, Deadline deadline);
  // Waits for one connection. CANCELLED after Shutdown from another thread.
  absl::StatusOr<Socket> Accept() const;

  // All of `bytes`, or UNAVAILABLE (the peer is gone), or DEADLINE_EXCEEDED.
  absl::Status Write(absl::Span<const std::byte> bytes, Deadline deadline) const;
  absl::Status Read(absl::Span<std::byte> bytes, Deadline deadline) const;

  // Makes calls in progress, in any thread, return an error.
  void Shutdown() const;

  int descriptor() const { return descriptor_; }
  int port() const;          // The local one.
  std::string host() const;  // The local address, in numbers.

 private:
  int descriptor_ = -1;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_COLLECTIVE_SOCKET_H_
