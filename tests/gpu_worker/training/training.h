// Whole trainings in this process: all ranks of a small world as threads, against a service in this
// process or the local optimizer.
#ifndef BALLAST_TESTS_GPU_WORKER_TRAINING_TRAINING_H_
#define BALLAST_TESTS_GPU_WORKER_TRAINING_TRAINING_H_

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu_optimizer_service/engine.h"
#include "gpu_worker/run/worker_run.h"
#include "gpu_worker/training/service_optimizer.h"
#include "server/server.h"
#include "tests/gpu_worker/collective/ranks.h"
#include "tests/gpu_worker/temp_path.h"

namespace ballast::worker {

class Service {
 public:
  explicit Service(client::SharedMemoryUse shared_memory = client::SharedMemoryUse::kNever)
      : shared_memory_(shared_memory),
        server_(server::Server::Start(engine_, {.listen = {}}).value()) {}

  MakeOptimizer Optimizer(const std::string& resume_directory = "",
                          absl::Duration seal_timeout = absl::Minutes(1)) {
    return [=, this](const TrainingJob& job, TrainingBackend& backend, Collective& collective) {
      return MakeServiceOptimizer(channel(),
                                  {.job = job,
                                   .backend = backend,
                                   .resume_directory = resume_directory,
                                   .seal_timeout = seal_timeout,
                                   .shared_memory = shared_memory_},
                                  collective);
    };
  }
  std::shared_ptr<grpc::Channel> channel() { return server_->InProcessChannel(); }
  std::shared_ptr<Job> job(const std::string& name = "gpt") {
    return engine_.FindJob(name).value();
  }
  Engine& engine() { return engine_; }
  // As if the rank's process opened a session again: the sessions of all ranks end.
  absl::Status EndSessions(int rank) {
    const absl::StatusOr<Attachment> attached =
        job()->Attach({.rank = rank, .process_id = job()->Status().ranks[rank].process_id});
    EXPECT_TRUE(attached.ok()) << attached.status();
    return absl::OkStatus();
  }

 private:
  const client::SharedMemoryUse shared_memory_;  // Its workers'.
  Engine engine_{{.memory_limit_bytes = int64_t{1} << 30, .threads = 2}};
  std::unique_ptr<server::Server> server_;
};

struct Training {
  int world_size = 1;
  uint32_t micro_steps = 2;
  DType wire_dtype = DType::kBFloat16;
  DType weights_dtype = DType::kBFloat16;
  uint64_t steps = 6;
  std::string save = {};
  Accumulation accumulation = Accumulation::kService;
  UpdateMode update_mode = UpdateMode::kSpeculate;
  std::optional<client::LossScalerOptions> loss_scaler = {};
  double max_norm = 0.5;  // Clips.
  bool check_gradients = false;
  std::function<uint32_t(uint64_t step)> micro_steps_of_step = {};
  std::string out = {};  // Empty: a directory that goes.
  bool resumes = false;
  bool keep_previous = false;
  Rule rule = Rule::kAdam;
  Orthogonalizer newton_schulz = Orthogonalizer::kService;
};

inline WorkerOptions OptionsOf(const Training& training) {
  WorkerOptions options;
  options.model = {.layers = 2, .heads = 2, .width = 32, .context = 32};
  options.trainer.batch = 4;
  options.trainer.micro_steps = training.micro_steps;
  options.trainer.micro_steps_of_step = training.micro_steps_of_step;
  options.trainer.steps = training.steps;
  options.trainer.learning_rate = {.peak = 3e-3, .warmup_steps = 2, .decay_end = 6};
  options.accumulation = training.accumulation;
  options.trainer.loss_scaler = training.loss_scaler;
  options.check_gradients = training.check_gradients;
  // Several buckets and several chunks in each shard.
  options.job.bucket_elements = 8192;
  options.job.chunk_elements = 1024;
  options.job.wire_dtype = training.wire_dtype;
  options.job.weights_dtype = training.weights_dtype;
  options.job.update_mode = training.update_mode;
  options.job.keep_previous = training.keep_previous;
  options.job.rule = training.rule;
  options.job.newton_schulz = training.newton_schulz;
  options.trainer.max_norm = training.max_norm;
  options.save_directory = training.save;
  options.resumes = training.resumes;
  return options;
}

struct Result {
  std::vector<StepReport> reports;  // Rank 0's, in order.
  std::string weights;
  std::vector<absl::Status> statuses;  // By rank.
};

inline std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Trains to wherever it gets; `on_step` is called on rank 0's thread.
inline Result TrainUntilItEnds(
    const Training& training, const MakeOptimizer& optimizer,
    const std::function<void(const StepReport&)>& on_step = [](const StepReport&) {}) {
  const TempPath temporary("training");
  Result result;
  result.statuses.resize(training.world_size);
  RunRanks(training.world_size, [&](Collective& collective) {
    WorkerOptions options = OptionsOf(training);
    options.out = training.out.empty() ? temporary.str() : training.out;
    result.statuses[collective.rank()] =
        RunWorker(options, collective, optimizer, [&](const StepReport& report) {
          if (collective.rank() != 0) return;
          result.reports.push_back(report);
          on_step(report);
        });
  });
  result.weights =
      ReadAll((training.out.empty() ? temporary.str() : training.out) + "/weights.bin");
  return result;
}

inline Result Train(
    const Training& training, const MakeOptimizer& optimizer,
    const std::function<void(const StepReport&)>& on_step = [](const StepReport&) {}) {
  Result result = TrainUntilItEnds(training, optimizer, on_step);
  for (int rank = 0; rank < training.world_size; ++rank) {
    EXPECT_TRUE(result.statuses[rank].ok()) << "rank " << rank << ": " << result.statuses[rank];
  }
  EXPECT_FALSE(result.weights.empty());
  return result;
}

// The same training to the bit.
inline void ExpectSame(const Result& a, const Result& b) {
  EXPECT_TRUE(a.weights == b.weights) << "the final weights differ";
  ASSERT_EQ(a.reports.size(), b.reports.size());
  for (size_t i = 0; i < a.reports.size(); ++i) {
    EXPECT_EQ(a.reports[i].step, b.reports[i].step);
    EXPECT_EQ(a.reports[i].loss, b.reports[i].loss) << "step " << a.reports[i].step;
    EXPECT_EQ(a.reports[i].applied, b.reports[i].applied) << "step " << a.reports[i].step;
    EXPECT_EQ(a.reports[i].loss_scale, b.reports[i].loss_scale) << "step " << a.reports[i].step;
    if (!a.reports[i].applied) continue;
    EXPECT_EQ(a.reports[i].norm, b.reports[i].norm) << "step " << a.reports[i].step;
    EXPECT_EQ(a.reports[i].clip_coefficient, b.reports[i].clip_coefficient);
  }
}

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_WORKER_TRAINING_TRAINING_H_
