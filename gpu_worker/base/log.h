// Lines for a person, on standard error; standard output is the progress line's.
#ifndef BALLAST_GPU_WORKER_BASE_LOG_H_
#define BALLAST_GPU_WORKER_BASE_LOG_H_

#include <spdlog/logger.h>

namespace ballast::worker {

// Thread-safe.
spdlog::logger& Log();

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BASE_LOG_H_
