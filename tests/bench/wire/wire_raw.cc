#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "cpu_optimizer_service/common/status.h"
#include "tests/bench/wire/raw_socket.h"
#include "tests/bench/wire/wire.h"

namespace ballast::bench {
namespace {

class RawWire final : public Wire {
 public:
  RawWire(int fd, const SendMemory& memory, int buffer_bytes)
      : fd_(fd), memory_(memory), buffer_bytes_(buffer_bytes) {
    if (buffer_bytes > 0) SetBuffers(fd, buffer_bytes);
  }
  ~RawWire() override { close(fd_); }

  absl::Status Transfer(int64_t up, int64_t down) override {
    const TransferSizes sizes{.up = up, .down = down, .buffer_bytes = buffer_bytes_};
    std::byte first[sizeof(sizes)];
    std::memcpy(first, &sizes, sizeof(sizes));
    BALLAST_RETURN_IF_ERROR(SendAll(fd_, first));
    absl::Status sent;
    std::thread sender;
    if (up > 0 && down > 0) {
      sender = std::thread([&] { sent = SendMessages(fd_, memory_, up); });
    } else {
      sent = SendMessages(fd_, memory_, up);
    }
    const absl::Status received = ReceiveMessages(fd_, down);
    // A sender that waits for a peer that is gone is woken.
    if (!received.ok()) shutdown(fd_, SHUT_RDWR);
    if (sender.joinable()) sender.join();
    BALLAST_RETURN_IF_ERROR(received);
    BALLAST_RETURN_IF_ERROR(sent);
    std::byte last{};
    BALLAST_ASSIGN_OR_RETURN(const bool there, ReceiveAll(fd_, absl::MakeSpan(&last, 1)));
    if (!there || last != kTransferDone) return absl::UnavailableError("the peer has gone");
    return absl::OkStatus();
  }

 private:
  const int fd_;
  const SendMemory& memory_;
  const int buffer_bytes_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Wire>> OpenRawWire(const std::string& address,
                                                  const SendMemory& memory, int buffer_bytes) {
  BALLAST_ASSIGN_OR_RETURN(const int fd, ConnectRaw(address));
  auto wire = std::make_unique<RawWire>(fd, memory, buffer_bytes);
  BALLAST_RETURN_IF_ERROR(LimitWaits(fd));
  return wire;
}

}  // namespace ballast::bench
