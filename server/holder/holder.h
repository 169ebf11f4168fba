// ballastd's parent: holds the memory that the service must not lose, starts the service as its
// child, and starts it again when it dies.
//
// It holds descriptors that the child hands it over a socket pair: memory files, and the sockets
// that are listened on, so that connections queue while there is no child. No other process can talk to
// it. Once it runs it allocates nothing and parses nothing, so it has next to no reason to die; if
// it does, the kernel ends the child and all that is held is gone.
#ifndef BALLAST_SERVER_HOLDER_HOLDER_H_
#define BALLAST_SERVER_HOLDER_HOLDER_H_

namespace ballast::server {

struct HolderOptions {
  // So many deaths in a row, none of a child that had served for some seconds, and it gives up.
  // 0: never.
  int most_deaths = 12;
  bool holds_jobs = true;  // Else they are kept elsewhere, and are not lost with what is held.
};

// Whether this process is a holder's child.
bool IsHeld();

// Starts this program again, with these arguments, as the child; returns the exit code. SIGTERM and
// SIGINT go to the child, and so does SIGHUP where the process has a terminal, which has closed
// then. A child that ends by itself, after such a signal or while nothing of a job is held, ends
// the holder with its code; one that ends by itself before it is ready is started again until it
// is; any other end is a death. `argv` ends with a null pointer. To be called
// before the process has other threads.
//
// A SIGHUP without a terminal, or one that asks for it (upgrade.h), is an upgrade: the program that
// has this one's path by now takes the child's place, and reads the configuration again. It is tried
// first; where it would not do, the child stays. It starts as after a death. If it ends before it
// serves, the program before it is started again. A SIGHUP that was ignored at the start is.
int RunHolder(char** argv, const HolderOptions& options);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_HOLDER_HOLDER_H_
