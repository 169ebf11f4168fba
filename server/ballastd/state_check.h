// --upgrade and --check-state: whether this program could serve in place of a running service. Each
// function prints a line and returns the exit code.
#ifndef BALLAST_SERVER_BALLASTD_STATE_CHECK_H_
#define BALLAST_SERVER_BALLASTD_STATE_CHECK_H_

#include "server/ballastd/ballastd_flags.h"

namespace ballast::server {

// --upgrade=PID: upgrades that service to the program on disk. 0 or 1.
int UpgradeService(const BallastdFlags& flags);

// --check-state=PID: whether this program can read that service's state. 0 or 2.
int CheckState(const BallastdFlags& flags);

// For a program that the holder tries: whether it can take over the held state with these flags. It
// reports to the holder. 0, 1 or 2.
int CheckHeldState(const BallastdFlags& flags);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_STATE_CHECK_H_
