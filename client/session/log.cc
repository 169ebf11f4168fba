#include "client/session/log.h"

#include <spdlog/sinks/stdout_sinks.h>

#include <memory>

namespace ballast::client {

spdlog::logger& Log() {
  static spdlog::logger logger("ballast", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  return logger;
}

}  // namespace ballast::client
