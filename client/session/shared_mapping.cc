#include "client/session/shared_mapping.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/transport/steady_deadline.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/populate_pages.h"
#include "proto/shared_memory_protocol.h"

namespace ballast::client {
namespace {

using Deadline = std::chrono::steady_clock::time_point;

absl::Status Failed(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

std::chrono::milliseconds Left(Deadline deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  // At least 1, because 0 means no limit for a socket; at most what poll accepts.
  return std::clamp(left, std::chrono::milliseconds(1), std::chrono::milliseconds(1 << 30));
}

bool Passed(Deadline deadline) { return std::chrono::steady_clock::now() >= deadline; }

absl::StatusOr<FileDescriptor> Dial(const std::string& name, Deadline deadline) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // An abstract name begins with a zero byte, and its length is given, not found by a final zero.
  if (name.empty() || name.size() >= sizeof(address.sun_path)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the service named a socket of ", name.size(), " characters"));
  }
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  // SOCK_SEQPACKET keeps the bounds of messages, so none has to be put together from parts.
  FileDescriptor connection(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (connection.number() < 0) return Failed("cannot make a socket for shared memory");
  const std::chrono::milliseconds left = Left(deadline);
  const timeval limit = {.tv_sec = static_cast<time_t>(left.count() / 1000),
                         .tv_usec = static_cast<suseconds_t>(left.count() % 1000 * 1000)};
  // The limit also bounds connect, which waits while the other side's queue of connections is full.
  if (setsockopt(connection.number(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) != 0) {
    return Failed("cannot limit the socket for shared memory");
  }
  while (connect(connection.number(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    if (errno == EINTR && !Passed(deadline)) continue;
    constexpr absl::string_view kUnreachable = "cannot reach the service's shared memory";
    // connect on a unix socket says this when SO_SNDTIMEO has passed.
    if (errno == EAGAIN) {
      return absl::UnavailableError(
          absl::StrCat(kUnreachable, ": it accepted no connection in time"));
    }
    // Nobody listens under this abstract name in this network namespace.
    if (errno == ECONNREFUSED) {
      return absl::NotFoundError(absl::StrCat(
          kUnreachable, ": no process listens on this host; memory is shared only on one host"));
    }
    return Failed(kUnreachable);
  }
  return connection;
}

absl::Status AwaitAnswer(int connection, Deadline deadline, absl::Duration limit) {
  pollfd wanted = {.fd = connection, .events = POLLIN, .revents = 0};
  for (;;) {
    const int ready = poll(&wanted, 1, static_cast<int>(Left(deadline).count()));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return Failed("waiting for shared memory");
    if (Passed(deadline)) {
      return absl::UnavailableError(
          absl::StrCat("the service did not hand over the shared memory in time, ",
                       absl::FormatDuration(limit)));
    }
  }
}

// The service's answer, and the files that it carried.
struct Answer {
  std::string text;
  std::vector<FileDescriptor> files;
};

absl::StatusOr<Answer> ReadAnswer(int connection) {
  // Room for more files than expected, so that unexpected ones are received and closed.
  constexpr size_t kMostFiles = 8;
  std::array<char, 1 + proto::kMaxSharedMemoryRefusalBytes> text;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMostFiles * sizeof(int))> control;
  iovec piece = {.iov_base = text.data(), .iov_len = text.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t received;
  // MSG_DONTWAIT: AwaitAnswer has waited, and a wait in here would have no limit.
  do {
    received = recvmsg(connection, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (received < 0 && errno == EINTR);
  if (received < 0) return Failed("receiving shared memory");
  Answer answer;
  // Before anything is refused: a descriptor that has arrived is open in this process, and stays so
  // until its owner here closes it.
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t files = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < files; ++i) {
      int number;
      std::memcpy(&number, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      answer.files.emplace_back(number);
    }
  }
  if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return absl::FailedPreconditionError("the service sent more than the shared memory's file");
  }
  answer.text.assign(text.data(), static_cast<size_t>(received));
  return answer;
}

absl::StatusOr<FileDescriptor> TakeFile(Answer answer) {
  // The end of the connection reads as a message without bytes.
  if (answer.text.empty()) {
    return absl::UnavailableError("the service closed the connection for shared memory");
  }
  // Escaped, because the service's words go into the log of this process.
  if (answer.text[0] == proto::kSharedMemoryRefused) {
    return absl::FailedPreconditionError(
        absl::StrCat("the service refused: ", absl::CHexEscape(answer.text.substr(1))));
  }
  if (answer.text[0] != proto::kSharedMemoryGranted || answer.text.size() != 1 ||
      answer.files.size() != 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("the service sent ", answer.text.size(), " bytes and ", answer.files.size(),
                     " files where one byte and one file were expected"));
  }
  return std::move(answer.files[0]);
}

// Checks that the file's size is fixed, so that no access to a mapping of it can be beyond its end.
absl::Status CheckFile(int file, int64_t size_bytes) {
  // In a file of reserved huge pages, an access fails if no such page is left.
  struct statfs system;
  if (fstatfs(file, &system) != 0) return Failed("the service's memory file");
  if (system.f_type != TMPFS_MAGIC) {
    return absl::FailedPreconditionError(
        absl::StrFormat("the service's memory file is not ordinary shared memory: its file system "
                        "is of type %#x",
                        static_cast<uint64_t>(system.f_type)));
  }
  // The seals before the size: without them it could change after it was looked at.
  const int seals = fcntl(file, F_GET_SEALS);
  constexpr int kNeeded = F_SEAL_SHRINK | F_SEAL_GROW;
  if (seals < 0 || (seals & kNeeded) != kNeeded) {
    return absl::FailedPreconditionError(
        "the service's memory file is not sealed against shrinking and growing");
  }
  struct stat facts;
  if (fstat(file, &facts) != 0) return Failed("the service's memory file");
  if (facts.st_size != size_bytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the service's memory file has ", int64_t{facts.st_size}, " bytes, expected ", size_bytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::byte*> Map(int file, size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) {
    return absl::FailedPreconditionError(
        absl::StrCat("mapping the service's memory file: ", std::strerror(errno)));
  }
  madvise(memory, bytes, MADV_HUGEPAGE);  // Only a hint: a failure costs some speed.
  // A forked child that continued the trainer's code would write into the parent's gradients.
  if (madvise(memory, bytes, MADV_DONTFORK) != 0) {
    const absl::Status failed = Failed("keeping shared memory from forked processes");
    munmap(memory, bytes);
    return failed;
  }
  // Maps the pages now rather than one by one in the first step. EINVAL: a kernel before 5.14.
  const int populated = PopulatePages(static_cast<std::byte*>(memory), bytes);
  if (populated != 0 && populated != EINVAL) {
    munmap(memory, bytes);
    return absl::FailedPreconditionError(
        absl::StrCat("the service's memory file has holes: ", std::strerror(populated)));
  }
  return static_cast<std::byte*>(memory);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedMapping>> SharedMapping::Connect(
    const v1::SharedMemoryOffer& offer, RankMemoryLayout places, absl::Duration limit) {
  const std::string& token = offer.token();
  if (token.size() != proto::kSharedMemoryTokenBytes || places.size_bytes() <= 0) {
    return absl::FailedPreconditionError(absl::StrCat("a token of ", token.size(), " bytes for ",
                                                      places.size_bytes(),
                                                      " bytes of memory cannot be used"));
  }
  const Deadline deadline = SteadyDeadline(limit);
  BALLAST_ASSIGN_OR_RETURN(FileDescriptor connection, Dial(offer.socket(), deadline));
  // MSG_NOSIGNAL: a service that has hung up must not end this process by SIGPIPE.
  if (send(connection.number(), token.data(), token.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(token.size())) {
    return Failed("sending the token for shared memory");
  }
  BALLAST_RETURN_IF_ERROR(AwaitAnswer(connection.number(), deadline, limit));
  BALLAST_ASSIGN_OR_RETURN(Answer answer, ReadAnswer(connection.number()));
  BALLAST_ASSIGN_OR_RETURN(const FileDescriptor file, TakeFile(std::move(answer)));
  BALLAST_RETURN_IF_ERROR(CheckFile(file.number(), places.size_bytes()));
  BALLAST_ASSIGN_OR_RETURN(std::byte* const memory,
                           Map(file.number(), static_cast<size_t>(places.size_bytes())));
  return std::unique_ptr<SharedMapping>(
      new SharedMapping(std::move(places), std::move(connection), memory));
}

SharedMapping::SharedMapping(RankMemoryLayout places, FileDescriptor connection, std::byte* memory)
    : places_(std::move(places)), connection_(std::move(connection)), memory_(memory) {}

SharedMapping::~SharedMapping() {
  // In this order: at the connection's end the service takes the pages back.
  munmap(memory_, static_cast<size_t>(places_.size_bytes()));
  shutdown(connection_.number(), SHUT_RDWR);  // A forked process may have the descriptor too.
}

absl::Span<std::byte> SharedMapping::At(const RankMemoryLayout::Place& place) const {
  if (place.offset_bytes < 0) return {};
  return {memory_ + place.offset_bytes, static_cast<size_t>(place.bytes)};
}

absl::Span<std::byte> SharedMapping::gradient(int chunk) const {
  return At(places_.gradient(chunk));
}

absl::Span<std::byte> SharedMapping::weights(int chunk) const { return At(places_.weights(chunk)); }

}  // namespace ballast::client
