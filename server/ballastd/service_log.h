// The log of the process.
#ifndef BALLAST_SERVER_BALLASTD_SERVICE_LOG_H_
#define BALLAST_SERVER_BALLASTD_SERVICE_LOG_H_

#include <functional>
#include <string>
#include <vector>

#include "server/holder/log_line.h"

namespace ballast::server {

// Makes spdlog's default logger one that writes to standard error from `level` on ("info"), in the
// process's format (SetLogFormat), and keeps the last lines as text. In JSON a line is an object:
// time (UTC), level, message, and job, where the line begins with "job NAME: ". Each of its entries
// is one printable line of a bounded size, whatever names of clients it quotes. Returns what gives
// the last lines for a bug report, oldest first; thread-safe.
std::function<std::vector<std::string>()> StartLog(const std::string& level);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_SERVICE_LOG_H_
