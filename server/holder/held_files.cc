#include "server/holder/held_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/holder/holder_table.h"

namespace ballast::server {
namespace {

constexpr char kStopAndStart[] = "stop the service, which saves its jobs, and start it again";

static_assert(kMaxKeptName < kHeldNameBytes);

// False: the holder is gone, and so will this process be.
bool Send(int socket, HolderMessage message, const std::string& name = "", int descriptor = -1) {
  name.copy(message.name, sizeof(message.name) - 1);
  iovec piece = {.iov_base = &message, .iov_len = sizeof(message)};
  msghdr header = {};
  header.msg_iov = &piece;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* const part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(part), &descriptor, sizeof(descriptor));
  }
  ssize_t sent = 0;
  do {
    sent = sendmsg(socket, &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(sizeof(message));
}

}  // namespace

absl::StatusOr<std::unique_ptr<HeldFiles>> HeldFiles::OfHolder() {
  const char* const variable = std::getenv(kHolderVariable);
  if (variable == nullptr) return nullptr;
  const std::vector<std::string> numbers = absl::StrSplit(variable, ',');
  unsetenv(kHolderVariable);
  int socket = -1;
  int table_file = -1;
  const bool are_numbers = numbers.size() == 2 && absl::SimpleAtoi(numbers[0], &socket) &&
                           absl::SimpleAtoi(numbers[1], &table_file);
  // Read by itself first: it alone has the same place in every version, and the rest of the table
  // may be of another size.
  uint32_t protocol = 0;
  if (are_numbers && pread(table_file, &protocol, sizeof(protocol), 0) == sizeof(protocol) &&
      protocol != kHolderProtocol) {
    return absl::FailedPreconditionError(
        absl::StrCat("the process that holds the service's memory speaks protocol version ",
                     protocol, ", this program ", kHolderProtocol, "; ", kStopAndStart));
  }
  void* const mapped =
      are_numbers ? mmap(nullptr, sizeof(HolderTable), PROT_READ, MAP_SHARED, table_file, 0)
                  : MAP_FAILED;
  if (mapped == MAP_FAILED) {
    return absl::InternalError(
        absl::StrCat("the environment has ", kHolderVariable, ", which is not of a holder"));
  }
  Table table(static_cast<const HolderTable*>(mapped));
  std::map<std::string, FileDescriptor> kept;
  for (const HeldFile& file : table->files) {
    if (file.descriptor == 0) continue;
    // The flag was taken away only for the start of this program (child_start.cc).
    fcntl(file.descriptor, F_SETFD, FD_CLOEXEC);
    kept.emplace(file.name, FileDescriptor(file.descriptor));
  }
  // Only the holder keeps it open: that is how upgrade.cc knows a holder.
  const FileDescriptor closed(table_file);
  fcntl(socket, F_SETFD, FD_CLOEXEC);
  // For ps and top. The parent alone is called ballastd: killall and pidof find it, and what it is
  // told it passes on.
  prctl(PR_SET_NAME, "ballastd-serve");
  return std::unique_ptr<HeldFiles>(
      new HeldFiles(FileDescriptor(socket), std::move(table), std::move(kept)));
}

void HeldFiles::Unmap::operator()(const HolderTable* table) const {
  munmap(const_cast<HolderTable*>(table), sizeof(HolderTable));
}

HeldFiles::HeldFiles(FileDescriptor socket, Table table, std::map<std::string, FileDescriptor> kept)
    : socket_(std::move(socket)),
      table_(std::move(table)),
      state_format_(table_->state_format),
      is_upgrade_(table_->is_upgrade != 0),
      deaths_(table_->deaths),
      kept_(std::move(kept)) {
  // The holder has them until they are dropped, so they count.
  for (const auto& [name, file] : kept_) held_.insert(name);
}

absl::Status HeldFiles::Keep(const std::string& name, int descriptor) {
  // Held while it sends, so that the holder gets what is kept and what is dropped in the order in
  // which held_ changed.
  MutexLock lock(mutex_);
  if (name.size() > kMaxKeptName) {
    return absl::InvalidArgumentError(absl::StrCat("the name ", name, " is too long to be kept"));
  }
  // The holder answers nothing. So it is counted here, and the holder always has a place.
  if (held_.size() >= kMostHeld) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the holder already has ", held_.size(), " descriptors, its maximum"));
  }
  held_.insert(name);
  // Once sent it is safe, without an answer: if this process dies, the message stays in the socket
  // with its descriptor, and the holder reads it before it starts the next process.
  if (!Send(socket_.number(), {.kind = HolderMessage::Kind::kKeep}, name, descriptor)) {
    const int error = errno;
    held_.erase(name);
    return absl::UnavailableError(
        absl::StrCat("the holder takes no descriptor: ", std::strerror(error)));
  }
  return absl::OkStatus();
}

void HeldFiles::Drop(const std::string& name) {
  MutexLock lock(mutex_);
  if (held_.erase(name) == 0) return;  // It has not come so far as to be kept.
  Send(socket_.number(), {.kind = HolderMessage::Kind::kDrop}, name);
}

std::map<std::string, FileDescriptor> HeldFiles::TakeKept() {
  MutexLock lock(mutex_);
  return std::exchange(kept_, {});
}

void HeldFiles::Ready(uint32_t state_format) {
  MutexLock lock(mutex_);
  Send(socket_.number(), {.kind = HolderMessage::Kind::kReady, .state_format = state_format});
}

bool HeldFiles::TakeStop() {
  auto& stops = const_cast<uint32_t&>(table_->stops);
  const uint32_t now = std::atomic_ref<uint32_t>(stops).load(std::memory_order_acquire);
  return std::exchange(stops_, now) != now;
}

void HeldFiles::StopRefused() {
  MutexLock lock(mutex_);
  Send(socket_.number(), {.kind = HolderMessage::Kind::kStopRefused});
}

void HeldFiles::SaidFarewell() {
  MutexLock lock(mutex_);
  Send(socket_.number(), {.kind = HolderMessage::Kind::kSaidFarewell});
}

void HeldFiles::CanTakeOver() {
  MutexLock lock(mutex_);
  Send(socket_.number(), {.kind = HolderMessage::Kind::kCanTakeOver});
}

}  // namespace ballast::server
