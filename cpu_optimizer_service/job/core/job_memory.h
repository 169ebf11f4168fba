// The memory of a job's state and gradients. Constant once allocated; its contents have their own
// locks and owners.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_JOB_MEMORY_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_JOB_MEMORY_H_

#include <memory>
#include <string>

#include "cpu_optimizer_service/gradients/direction_store.h"
#include "cpu_optimizer_service/gradients/gradient_store.h"
#include "cpu_optimizer_service/gradients/weight_buffer.h"
#include "cpu_optimizer_service/host/memory_budget.h"
#include "cpu_optimizer_service/job/job_status.h"
#include "cpu_optimizer_service/state/chunk_store.h"

namespace ballast {

struct JobMemory {
  MemoryNeed need;
  std::string speculation_refused;  // Why a job waits although it requested speculation.
  MemoryBudget::Reservation reservation;
  std::unique_ptr<GradientStore> gradients;
  std::unique_ptr<DirectionStore> directions;  // Null: no rule has two rounds.
  std::unique_ptr<ChunkStore> store;
  std::shared_ptr<WeightBufferPool> weight_buffers;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_JOB_MEMORY_H_
