// ballastd's parent: holds the memory that the service must not lose, starts the service as its
// child, and restarts it after a crash.
//
// It holds descriptors that the child sends it over a socket pair: memory files, and listening
// sockets, so that connections queue while there is no child. No other process can talk to it. Once
// it runs, it allocates nothing and parses nothing, so it can hardly crash. If it does, the kernel
// ends the child, and all held memory is lost.
#ifndef BALLAST_SERVER_HOLDER_HOLDER_H_
#define BALLAST_SERVER_HOLDER_HOLDER_H_

namespace ballast::server {

struct HolderOptions {
  // It gives up after so many crashes in a row of children that served less than some seconds. 0:
  // never.
  int most_deaths = 12;
  bool holds_jobs = true;  // False: jobs are kept elsewhere, and survive the holder.
};

// Whether this process is a holder's child.
bool IsHeld();

// Starts this program again, with these arguments, as the child; returns the exit code. `argv` ends
// with a null pointer. Call it before the process has other threads.
//
// Signals: SIGTERM and SIGINT go to the child. SIGHUP goes to it if the process has a terminal,
// which has closed then. A SIGHUP that was ignored at the start stays ignored.
//
// A child's end: if it exits by itself after such a signal, or while no job is held, the holder
// exits with its code. If it exits by itself before it is ready, it is restarted until it is. Any
// other end is a crash.
//
// A SIGHUP without a terminal, or one that requests it (upgrade.h), is an upgrade. The program at
// this one's path replaces the child, and reads the configuration again. It is tried first; if it
// is unfit, the child stays. It starts as after a crash. If it ends before it serves, the previous
// program starts again.
int RunHolder(char** argv, const HolderOptions& options);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_HOLDER_HOLDER_H_
