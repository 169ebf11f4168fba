// Where the values of ballastd's flags come from: defaults, the file that --config names, the
// environment and the command line. Each comes before those that are named before it here.
//
// There is one table of flags: Abseil's, of those that ballastd_flags.cc defines. A flag --drain-seconds
// is the line `drain-seconds = 5` of the file and the variable BALLASTD_DRAIN_SECONDS. In the file,
// empty lines and what follows a # at the beginning of a line mean nothing.
#ifndef BALLAST_SERVER_BALLASTD_FLAG_SOURCES_H_
#define BALLAST_SERVER_BALLASTD_FLAG_SOURCES_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ballast::server {

// Sets the flags. `arguments` begin with the program's name. INVALID_ARGUMENT, in one line, for
// unknown names, with a known one that is like it, for bad values, and for a file that cannot be
// read, is written by others or has a key twice. Variables of other names are left alone.
// --help prints and ends the process.
absl::Status SetFlags(const std::vector<std::string>& arguments);

// What --help prints: the flags by what they are about.
std::string FlagsHelp();

// Every flag's value as it is now, by name, for a bug report. None of them is a secret: those are in
// files.
std::map<std::string, std::string> FlagValues();

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_FLAG_SOURCES_H_
