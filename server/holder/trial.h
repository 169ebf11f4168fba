// Tries a program before it replaces the service: whether it starts, its flags and their files are
// valid, and it can read the held state. It runs beside the service and changes nothing.
#ifndef BALLAST_SERVER_HOLDER_TRIAL_H_
#define BALLAST_SERVER_HOLDER_TRIAL_H_

#include <sys/types.h>

#include "server/holder/child_start.h"

namespace ballast::server {

// Allocates nothing.
class Trial {
 public:
  // False, with the reason in why_not(): it cannot be started. `path`: of the program.
  bool Start(const char* path, ChildStart start);
  bool running() const { return pid_ > 0; }
  // Becomes readable with the program's output; -1: not running.
  int output() const { return output_; }
  // Until its time limit, for poll().
  int milliseconds_left() const;
  // Reads its output; true, once, when it has ended or was killed.
  bool Ended();
  // After its end. Null: it can take over.
  const char* why_not() const { return has_passed_ ? nullptr : said_; }
  // The program; the caller owns it now.
  int TakeProgram();
  // Kills it if it runs, and forgets it.
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
