// What the holder has, in memory that it shares with its child: names and descriptors, which the
// child inherits under the same numbers. And the messages by which the child changes it.
//
// A process that may look at the holder's descriptors reads there, too, how the service is (upgrade.h).
#ifndef BALLAST_SERVER_HOLDER_HOLDER_TABLE_H_
#define BALLAST_SERVER_HOLDER_HOLDER_TABLE_H_

#include <signal.h>

#include <cstdint>

namespace ballast::server {

// Of everything in this file. A holder and a child of different ones do not work together.
inline constexpr uint32_t kHolderProtocol = 3;

inline constexpr int kMostHeld = 16384;
inline constexpr int kHeldNameBytes = 120;  // With a zero at its end.
inline constexpr int kReasonBytes = 512;    // With a zero at its end.

struct HeldFile {
  char name[kHeldNameBytes];
  int32_t descriptor;  // 0: the place is free.
};

struct HolderTable {
  uint32_t protocol;  // Stays the first.
  // Of what jobs are kept in, as the child says that was ready last, and says again when it changes;
  // 0: none has been.
  uint32_t state_format;
  int32_t child;        // The process that serves, or will soon.
  uint32_t stops;       // Signals that were passed on to it, each counted before it was sent.
  uint32_t is_upgrade;  // It has taken an earlier one's place, which had not died.
  // Rises when an upgrade is taken up, before its program is opened, and when it has ended, after what
  // is below was stored: odd while one is under way.
  uint32_t upgrades;
  uint32_t has_upgraded;  // The last one of them.
  uint64_t deaths;        // Of the processes that served.
  char why_not[kReasonBytes];
  HeldFile files[kMostHeld];
};

// One packet; kKeep carries the descriptor.
struct HolderMessage {
  enum class Kind : uint32_t {
    kKeep,
    kDrop,
    kReady,
    kStopRefused,
    kSaidFarewell,  // It may be replaced now.
    kCanTakeOver
  };
  Kind kind;
  uint32_t state_format;  // Of kReady.
  char name[kHeldNameBytes];
};

// The name of the table's file.
inline constexpr char kHolderFile[] = "ballastd-holder";

// In the child's environment: the numbers of the socket and of the table's file, "5,6". Not BALLASTD_...,
// which are flags.
inline constexpr char kHolderVariable[] = "BALLAST_HELD_FILES";

// The last argument of a program that is tried (trial.h): whether it can take over, and no more.
inline constexpr char kTrialArgument[] = "--check-state=held";

// What a SIGHUP carries that asks for an upgrade, wherever the service was started from.
inline constexpr int kUpgradeAsked = 0x42616c;

// To the child, which is about to be replaced: it tells its clients so, and says kSaidFarewell.
// SIGRTMIN ends a drain (ballastd_main.cc), the next asks threads for their stacks (thread_facts.cc).
inline int FarewellSignal() { return SIGRTMIN + 2; }

}  // namespace ballast::server

#endif  // BALLAST_SERVER_HOLDER_HOLDER_TABLE_H_
