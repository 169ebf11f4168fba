// Short histories of one machine of a step (step_machine.h), without an engine: ranks that say things
// in any order, again, too late or too early, discard, vote otherwise, and processes that die.
#ifndef BALLAST_TESTS_HISTORIES_MACHINE_MACHINE_HISTORIES_H_
#define BALLAST_TESTS_HISTORIES_MACHINE_MACHINE_HISTORIES_H_

#include <cstdint>
#include <string>

namespace ballast::histories {

// How often each happened.
struct MachineTally {
  int64_t events = 0;
  int64_t refused = 0;  // Calls, with an error.
  int64_t refused_seals = 0;
  int64_t repeats = 0;
  int64_t discards = 0;
  int64_t reopened = 0;
  int64_t void_votes = 0;
  int64_t decided = 0;
  int64_t dropped = 0;
  int64_t deaths = 0;
};

// Plays the histories of seeds first, first + 1, ... (`count` of them) against a model. Empty if all
// passed; else, of the first that fails, its seed, its events, and what differs.
std::string RunMachineHistories(uint64_t first, int64_t count, MachineTally& tally);

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_MACHINE_MACHINE_HISTORIES_H_
