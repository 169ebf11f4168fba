// Log lines on standard error; standard output has the progress line.
#ifndef BALLAST_GPU_WORKER_BASE_LOG_H_
#define BALLAST_GPU_WORKER_BASE_LOG_H_

#include <spdlog/logger.h>

namespace ballast::worker {

// Thread-safe.
spdlog::logger& Log();

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BASE_LOG_H_
