// What a process is started with that the holder starts: the service, or a program that is tried.
#ifndef BALLAST_SERVER_HOLDER_CHILD_START_H_
#define BALLAST_SERVER_HOLDER_CHILD_START_H_

#include <sys/types.h>

#include "server/holder/holder_table.h"

namespace ballast::server {

struct ChildStart {
  int program = -1;  // Opened; what its file is by now does not matter.
  char** argv = nullptr;
  const HolderTable* table = nullptr;
  int table_file = -1;
  int socket = -1;  // Its end.
  int output = -1;  // For what it prints; -1: where the holder prints.
};

// Starts it with all descriptors that are held; it dies with the holder. Returns its number, or -1
// with errno.
pid_t StartHeldChild(const ChildStart& start);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_HOLDER_CHILD_START_H_
