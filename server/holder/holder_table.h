// What the holder has, in memory shared with its child: names and descriptors, which the child
// inherits under the same numbers. Also the messages by which the child changes it.
//
// A process that may read the holder's descriptors also finds the service's state there
// (upgrade.h).
#ifndef BALLAST_SERVER_HOLDER_HOLDER_TABLE_H_
#define BALLAST_SERVER_HOLDER_HOLDER_TABLE_H_

#include <signal.h>

#include <cstdint>

namespace ballast::server {

// Of everything in this file. A holder and a child with different ones do not work together.
inline constexpr uint32_t kHolderProtocol = 1;

inline constexpr int kMostHeld = 16384;
inline constexpr int kHeldNameBytes = 120;  // Including a zero at its end.
inline constexpr int kReasonBytes = 512;    // Including a zero at its end.

struct HeldFile {
  char name[kHeldNameBytes];
  int32_t descriptor;  // 0: the place is free.
};

struct HolderTable {
  uint32_t protocol;  // Must remain first.
  // The format of kept jobs, from the last child that was ready; it reports changes. 0: no child
  // has been.
  uint32_t state_format;
  int32_t child;        // The process that serves, or soon will.
  uint32_t stops;       // Signals passed on to it, each counted before it was sent.
  uint32_t is_upgrade;  // It has replaced a process that had not crashed.
  // Rises when an upgrade begins, before its program is opened. Rises again when it has ended,
  // after the fields below are stored. So it is odd during an upgrade.
  uint32_t upgrades;
  uint32_t has_upgraded;  // The last one succeeded.
  uint64_t deaths;        // Crashes of processes that served.
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

// In the child's environment: the numbers of the socket and of the table's file, "5,6". The name
// does not begin with BALLASTD_, because that means flags.
inline constexpr char kHolderVariable[] = "BALLAST_HELD_FILES";

// The last argument of a program on trial (trial.h): it only says whether it can take over.
inline constexpr char kTrialArgument[] = "--check-state=held";

// The value of a SIGHUP that requests an upgrade, wherever the service was started from.
inline constexpr int kUpgradeAsked = 0x42616c;

// To the child, which is about to be replaced: it tells its clients, and sends kSaidFarewell.
// SIGRTMIN ends a drain (ballastd_main.cc).
inline int FarewellSignal() { return SIGRTMIN + 1; }

}  // namespace ballast::server

#endif  // BALLAST_SERVER_HOLDER_HOLDER_TABLE_H_
