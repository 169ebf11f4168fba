// A program that is tried before it takes the service's place: whether it starts, its flags and the
// files that they name are good, and it reads what is held. It runs beside the service and changes
// nothing.
#ifndef BALLAST_SERVER_HOLDER_TRIAL_H_
#define BALLAST_SERVER_HOLDER_TRIAL_H_

#include <sys/types.h>

#include "server/holder/child_start.h"

namespace ballast::server {

// Allocates nothing.
class Trial {
 public:
  // False, and why_not() says why: it cannot even be started. `path`: of the program.
  bool Start(const char* path, ChildStart start);
  bool running() const { return pid_ > 0; }
  // Becomes readable with what the program says; -1: not running.
  int output() const { return output_; }
  // Until it has had time enough, for poll().
  int milliseconds_left() const;
  // Reads what it has said; true, once, when it has ended, or had to be ended.
  bool Ended();
  // Of one that has ended. Null: it can take over.
  const char* why_not() const { return has_passed_ ? nullptr : said_; }
  // The program, which is the caller's now.
  int TakeProgram();
  // Ends it where it runs, and forgets it.
  void GiveUp();

 private:
  void Read();
  void SayEnd(const char* how, int number);

  pid_t pid_ = 0;
  int program_ = -1;
  int output_ = -1;
  int socket_ = -1;
  double deadline_ = 0;
  bool has_passed_ = false;
  char said_[kReasonBytes] = {};  // Its first line.
  int said_bytes_ = 0;
  bool has_line_ = false;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_HOLDER_TRIAL_H_
