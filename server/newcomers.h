// Connections that have been accepted and not yet handed on.
//
// To gRPC a connection costs a quarter of a millisecond, with TLS a whole one, of the threads that
// carry all training, also one whose peer says nothing or has gone again. So one stays here
// until its client has said what every client says first, and those that have are handed on at a
// pace: a flood of them takes a known part of the processors, however long it lasts.
#ifndef BALLAST_SERVER_NEWCOMERS_H_
#define BALLAST_SERVER_NEWCOMERS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "cpu_optimizer_service/common/system/file_descriptor.h"

namespace ballast::server {

// Processor time that may be spent: first all that is saved up, then a part of the time that
// passes. Not thread-safe.
class Pace {
 public:
  using Clock = std::chrono::steady_clock;

  // As much as `most` is saved up. `share` of a second is added each second.
  Pace(Clock::duration most, double share) : most_(most), share_(share), left_(most) {}

  // Whether something of `cost` may begin now; then it is spent.
  bool Spend(Clock::duration cost, Clock::time_point now);
  // When it may, as of the last call of Spend.
  Clock::time_point When(Clock::duration cost) const;

 private:
  const Clock::duration most_;
  const double share_;
  Clock::duration left_;  // At:
  Clock::time_point counted_{};
};

// Not thread-safe.
class Newcomers {
 public:
  using Clock = Pace::Clock;
  // Of a connection here; never used again.
  using Id = uint64_t;
  // Until when the source's connections are not handed on; a time in the past: they are.
  using HeldUntil = std::function<Clock::time_point(const std::string& source)>;

  // A client that has not said enough by then, or has waited so long, is let go.
  static constexpr std::chrono::seconds kPatience{20};
  static constexpr std::chrono::microseconds kCost{250};
  static constexpr std::chrono::microseconds kTlsCost{1000};
  // Hundreds of ranks that connect at once do not wait.
  static constexpr std::chrono::milliseconds kSaved{512};
  static constexpr double kShare = 0.05;  // Of each processor, of as many as gRPC uses:
  static constexpr unsigned kMostProcessors = 32;

  // At the pace of this machine.
  explicit Newcomers(HeldUntil held_until);
  Newcomers(HeldUntil held_until, Pace pace) : held_until_(std::move(held_until)), pace_(pace) {}

  // `source`: who is at the other end, as an address or a user. `tls`: what its client is to speak.
  Id Add(FileDescriptor connection, std::string source, bool tls, Clock::time_point now);
  // Something has come from its client, or its end. Nothing happens if the connection is not here.
  void OnReadable(Id id);
  // Closes those whose time is over.
  void DropLate(Clock::time_point now);
  // Closes the one that has been here longest, where there is one. A client that speaks at once is
  // not here for long.
  void DropOldest();

  // The next that is handed on: of each source in its turn the newest, since who has waited long may
  // have given up. None: not before WhenNext.
  FileDescriptor Next(Clock::time_point now);
  // When DropLate or Next have something to do, should no client say anything; none: never.
  std::optional<Clock::time_point> WhenNext(Clock::time_point now) const;

  size_t size() const { return all_.size(); }

 private:
  struct Newcomer {
    FileDescriptor connection;
    std::string source;
    bool tls = false;
    Clock::time_point since;
  };
  using All = std::map<Id, Newcomer>;  // From the oldest on.

  void Remove(All::iterator newcomer);
  // The end: none.
  All::iterator Choose(Clock::time_point now);

  const HeldUntil held_until_;
  Pace pace_;
  Id last_ = 0;
  All all_;
  std::map<std::string, std::set<Id>> ready_;  // By source: those that have said enough.
  std::string served_;                         // The last source.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_NEWCOMERS_H_
