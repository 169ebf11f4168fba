// What ballastd does beside serving, for --upgrade and --check-state: in place of a service that
// runs, could this program serve? Each prints a line and returns the exit code.
#ifndef BALLAST_SERVER_BALLASTD_STATE_CHECK_H_
#define BALLAST_SERVER_BALLASTD_STATE_CHECK_H_

#include "server/ballastd/ballastd_flags.h"

namespace ballast::server {

// --upgrade=PID: has that service go on with the program on disk. 0 or 1.
int UpgradeService(const BallastdFlags& flags);

// --check-state=PID: whether this program reads what that service keeps. 0 or 2.
int CheckState(const BallastdFlags& flags);

// As a program that the holder tries: whether what is held can be taken over with these flags. The
// holder hears of it. 0, 1 or 2.
int CheckHeldState(const BallastdFlags& flags);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_STATE_CHECK_H_
