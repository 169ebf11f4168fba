#include "tests/bench/load/process_usage.h"

#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <time.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ballast::bench {
namespace {

// The number of KiB in a line "Key:   123 kB" of a file in /proc; 0 if there is none.
int64_t FieldBytes(const std::string& path, absl::string_view key) {
  std::ifstream file(path);
  std::string word;
  int64_t kib = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key.data(), key.size()) != 0) continue;
    if (std::sscanf(line.c_str() + key.size(), ": %ld kB", &kib) == 1) return kib * 1024;
  }
  return 0;
}

int PeerPort(int socket) {
  sockaddr_storage address;
  socklen_t size = sizeof(address);
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return -1;
  if (address.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<sockaddr_in*>(&address)->sin_port);
  }
  if (address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<sockaddr_in6*>(&address)->sin6_port);
  }
  return -1;
}

}  // namespace

absl::StatusOr<double> CpuSeconds(pid_t pid) {
  clockid_t clock;
  timespec time;
  const int error = clock_getcpuclockid(pid, &clock);
  if (error != 0 || clock_gettime(clock, &time) != 0) {
    return absl::ErrnoToStatus(error != 0 ? error : errno,
                               absl::StrCat("cannot read the CPU time of process ", pid));
  }
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

absl::StatusOr<ResidentMemory> ResidentMemoryOf(pid_t pid) {
  const std::string path = absl::StrCat("/proc/", pid, "/status");
  ResidentMemory memory{.total_bytes = FieldBytes(path, "VmRSS"),
                        .anonymous_bytes = FieldBytes(path, "RssAnon"),
                        .shared_bytes = FieldBytes(path, "RssShmem"),
                        .peak_bytes = FieldBytes(path, "VmHWM")};
  if (memory.total_bytes == 0) {
    return absl::UnavailableError(absl::StrCat("cannot read the memory of process ", pid));
  }
  return memory;
}

SocketBytes TcpBytes(int port) {
  SocketBytes bytes;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    int fd = -1;
    if (!absl::SimpleAtoi(entry.path().filename().string(), &fd) || PeerPort(fd) != port) continue;
    tcp_info info;
    std::memset(&info, 0, sizeof(info));
    socklen_t size = sizeof(info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;
    bytes.sent += static_cast<int64_t>(info.tcpi_bytes_acked);
    bytes.received += static_cast<int64_t>(info.tcpi_bytes_received);
  }
  return bytes;
}

}  // namespace ballast::bench
