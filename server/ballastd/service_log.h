// The log of the process.
#ifndef BALLAST_SERVER_BALLASTD_SERVICE_LOG_H_
#define BALLAST_SERVER_BALLASTD_SERVICE_LOG_H_

#include <functional>
#include <string>
#include <vector>

#include "server/holder/log_line.h"

namespace ballast::server {

// Makes spdlog's default logger write to standard error from `level` on ("info"), in the process's
// format (SetLogFormat), and keep the last lines as text. In JSON a line is an object: time (UTC),
// level, message, and job, if the line begins with "job NAME: ". Each entry is one printable line
// of bounded size, whatever names of clients it quotes. Returns a function that gives the last
// lines for a bug report, oldest first; thread-safe.
std::function<std::vector<std::string>()> StartLog(const std::string& level);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_SERVICE_LOG_H_
