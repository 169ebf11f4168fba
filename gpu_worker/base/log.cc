#include "gpu_worker/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>

#include <memory>

namespace ballast::worker {

spdlog::logger& Log() {
  static spdlog::logger logger("ballast-worker", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  return logger;
}

}  // namespace ballast::worker
