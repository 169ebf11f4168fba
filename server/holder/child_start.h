// How the holder starts a process: the service, or a program on trial.
#ifndef BALLAST_SERVER_HOLDER_CHILD_START_H_
#define BALLAST_SERVER_HOLDER_CHILD_START_H_

#include <sys/types.h>

#include "server/holder/holder_table.h"

namespace ballast::server {

struct ChildStart {
  int program = -1;  // An open descriptor; its file may change afterwards.
  char** argv = nullptr;
  const HolderTable* table = nullptr;
  int table_file = -1;
  int socket = -1;  // The child's end.
  int output = -1;  // For the child's output; -1: the holder's own.
};

// Starts it with all held descriptors; it ends with the holder. Returns its process number, or -1
// with errno.
pid_t StartHeldChild(const ChildStart& start);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_HOLDER_CHILD_START_H_
