// The client's log. It writes to the error output, because the standard output is the trainer's.
#ifndef BALLAST_CLIENT_SESSION_LOG_H_
#define BALLAST_CLIENT_SESSION_LOG_H_

#include <spdlog/logger.h>

namespace ballast::client {

spdlog::logger& Log();

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_LOG_H_
