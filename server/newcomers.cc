#include "server/newcomers.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <utility>

#include "cpu_optimizer_service/common/limits/processors.h"

namespace ballast::server {
namespace {

// With which every client of HTTP/2 begins, before it has received anything (RFC 9113, 3.4).
constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr size_t kPrefaceBytes = sizeof(kPreface) - 1;
// And every client of TLS, with a record of a handshake (RFC 8446, 5.1).
constexpr unsigned char kHandshakeRecord = 22;
constexpr size_t kRecordHeaderBytes = 5;
constexpr int kMostRecordBytes = 1 << 14;

bool IsGone(int connection) {
  pollfd polled = {.fd = connection, .events = POLLRDHUP, .revents = 0};
  return poll(&polled, 1, 0) == 1;  // Also of an error.
}

// What a client of another protocol says is enough: gRPC tells it so.
bool HasSaidEnough(int connection, bool tls) {
  std::array<unsigned char, kPrefaceBytes> said = {};
  // Only looked at: whoever gets the connection has to find all of it there.
  const ssize_t count = recv(connection, said.data(), said.size(), MSG_PEEK | MSG_DONTWAIT);
  if (count <= 0) return false;
  const auto bytes = static_cast<size_t>(count);
  if (!tls) {
    return bytes == kPrefaceBytes || std::memcmp(said.data(), kPreface, bytes) != 0;
  }
  if (said[0] != kHandshakeRecord) return true;
  // The header is a type, a version of two bytes and the length of the rest in two.
  if (bytes < kRecordHeaderBytes) return false;
  const int record = said[3] << 8 | said[4];
  int there = 0;
  // No record is longer than 2^14 bytes; a client that announces more gets its answer from gRPC.
  return record > kMostRecordBytes || ioctl(connection, FIONREAD, &there) != 0 ||
         there >= static_cast<int>(kRecordHeaderBytes) + record;
}

}  // namespace

// A token bucket; what is in it is time.
bool Pace::Spend(Clock::duration cost, Clock::time_point now) {
  // The first time counts from there.
  if (counted_ != Clock::time_point() && now > counted_) {
    const std::chrono::duration<double> passed = now - counted_;
    left_ = std::min(most_, left_ + std::chrono::duration_cast<Clock::duration>(passed * share_));
  }
  counted_ = std::max(counted_, now);
  if (left_ < cost) return false;
  left_ -= cost;
  return true;
}

Pace::Clock::time_point Pace::When(Clock::duration cost) const {
  if (left_ >= cost) return counted_;
  const std::chrono::duration<double> missing = cost - left_;
  return counted_ + std::chrono::ceil<Clock::duration>(missing / share_);
}

Newcomers::Newcomers(HeldUntil held_until)
    : Newcomers(std::move(held_until),
                Pace(kSaved, kShare * std::min<int>(UsableProcessorCount(), kMostProcessors))) {}

Newcomers::Id Newcomers::Add(FileDescriptor connection, std::string source, bool tls,
                             Clock::time_point now) {
  const Id id = last_ + 1;
  all_.emplace(id, Newcomer{.connection = std::move(connection),
                            .source = std::move(source),
                            .tls = tls,
                            .since = now});
  // Last: if there was no memory for the connection, nothing has changed.
  return last_ = id;
}

void Newcomers::Remove(All::iterator newcomer) {
  if (const auto ready = ready_.find(newcomer->second.source); ready != ready_.end()) {
    ready->second.erase(newcomer->first);
    if (ready->second.empty()) ready_.erase(ready);
  }
  all_.erase(newcomer);
}

void Newcomers::OnReadable(Id id) {
  const auto newcomer = all_.find(id);
  if (newcomer == all_.end()) return;
  const Newcomer& it = newcomer->second;
  if (IsGone(it.connection.number())) return Remove(newcomer);
  if (!HasSaidEnough(it.connection.number(), it.tls)) return;
  // A source never has an empty set, also where there is no memory for what would be in it.
  if (const auto ready = ready_.find(it.source); ready != ready_.end()) {
    ready->second.insert(id);
  } else {
    ready_.emplace(it.source, std::set<Id>{id});
  }
}

void Newcomers::DropLate(Clock::time_point now) {
  while (!all_.empty() && now - all_.begin()->second.since >= kPatience) Remove(all_.begin());
}

void Newcomers::DropOldest() {
  if (!all_.empty()) Remove(all_.begin());
}

Newcomers::All::iterator Newcomers::Choose(Clock::time_point now) {
  // From the source behind the last one on, and round: each has its turn, however many connections
  // another one opens.
  auto turn = ready_.upper_bound(served_);
  for (size_t left = ready_.size(); left > 0; --left, ++turn) {
    if (turn == ready_.end()) turn = ready_.begin();
    if (held_until_(turn->first) <= now) return all_.find(*turn->second.rbegin());
  }
  return all_.end();
}

FileDescriptor Newcomers::Next(Clock::time_point now) {
  while (true) {
    const auto next = Choose(now);
    if (next == all_.end()) return FileDescriptor();
    // It may have gone since it spoke. Then it must not cost what only one costs that is handed on.
    if (IsGone(next->second.connection.number())) {
      Remove(next);
      continue;
    }
    // Where there is not enough for this one, no other is taken in its place: cheaper ones would
    // then keep coming before one with TLS.
    if (!pace_.Spend(next->second.tls ? kTlsCost : kCost, now)) return FileDescriptor();
    served_ = next->second.source;
    FileDescriptor connection = std::move(next->second.connection);
    Remove(next);
    return connection;
  }
}

std::optional<Newcomers::Clock::time_point> Newcomers::WhenNext(Clock::time_point now) const {
  if (all_.empty()) return std::nullopt;
  Clock::time_point next = all_.begin()->second.since + kPatience;
  for (const auto& [source, ids] : ready_) {
    const Clock::duration cost = all_.at(*ids.rbegin()).tls ? kTlsCost : kCost;
    const Clock::time_point held = held_until_(source);
    next = std::min(next, std::max(held, pace_.When(cost)));
    // Only the pace holds this one back, as it does all others. To look at every source would take
    // long in a flood from many.
    if (held <= now) break;
  }
  return next;
}

}  // namespace ballast::server
