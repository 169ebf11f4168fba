// What a service does before it stops.
#ifndef BALLAST_SERVER_BALLASTD_DRAIN_H_
#define BALLAST_SERVER_BALLASTD_DRAIN_H_

#include <string>
#include <vector>

#include "cpu_optimizer_service/engine.h"

namespace ballast::server {

struct DrainReport {
  std::vector<std::string> aborted;  // One line per job whose step did not end in time.
  std::vector<std::string> saved;    // One line per job.
  std::vector<std::string> lost;  // One line per job without a --checkpoint-dir, or that is broken.
  std::vector<std::string> failed;  // One line per job that could not be saved, with the reason.
};

// Refuses new steps and lets those in progress end within `seconds`. Then it aborts undecided
// steps; a step that no worker can finish is aborted at once. It saves every job that has weights
// to CHECKPOINT_DIRECTORY/JOB, however long that takes. No step commits after its job's save,
// unless the drain is ended (Engine::EndDrain). With an empty directory no job is saved, and all
// are lost.
DrainReport DrainAndSave(Engine& engine, double seconds, const std::string& checkpoint_directory);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_DRAIN_H_
