// The servers that wire_apis compares, in a process of their own.
#ifndef BALLAST_TESTS_BENCH_WIRE_WIRE_APIS_SERVERS_H_
#define BALLAST_TESTS_BENCH_WIRE_WIRE_APIS_SERVERS_H_

#include <grpcpp/support/byte_buffer.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tests/bench/wire/wire.h"

namespace ballast::bench {

inline constexpr char kExchangeMethod[] = "/wire_apis/Exchange";
inline constexpr const char* kApis[] = {"callback", "completion_queue", "sync"};
inline constexpr const char* kFamilies[] = {"tcp", "unix"};

// What a completion queue brings back: what is to be done when the operation has ended.
using Tag = std::function<void(bool ok)>;

// A message on memory that outlives it.
grpc::ByteBuffer MessageAt(const SendMemory& memory, int64_t index);
// Reads all of it, as an addition would. False if it is not whole.
bool Consume(grpc::ByteBuffer& message);

// One server for each API; each answers every message with one of its own, without waiting for one
// to go before it reads the next. The process ends with the object, or with this process.
class ExchangeServers {
 public:
  ExchangeServers() = default;
  ExchangeServers(const ExchangeServers&) = delete;
  ExchangeServers& operator=(const ExchangeServers&) = delete;
  ~ExchangeServers();

  // Forks, and so must be called before there are other threads.
  absl::Status Start();
  pid_t pid() const { return pid_; }
  const std::string& address(size_t api, size_t family) const;  // Of kApis and kFamilies.

 private:
  std::string folder_;
  pid_t pid_ = -1;
  std::vector<std::string> addresses_;
};

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_WIRE_WIRE_APIS_SERVERS_H_
