#include "gpu_worker/run/worker_flags.h"

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/default_service.h"
#include "client/loss_scaler.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/plan/homes.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "cpu_optimizer_service/common/text/checkpoint_name.h"
#include "cpu_optimizer_service/common/text/command_line.h"
#include "gpu_worker/gpt/architecture.h"
#include "proto/cluster/cluster.h"

namespace ballast::worker {
namespace {

// How far apart workers may be when one begins to wait for the service and others for it.
constexpr absl::Duration kPeersApart = absl::Minutes(5);
constexpr char kAbout[] =
    "ballast-worker: one rank of a training run\n\nIt reads RANK, LOCAL_RANK, WORLD_SIZE, "
    "MASTER_ADDR and MASTER_PORT from the environment, as\ntorchrun sets them. Defaults are in "
    "parentheses.\n";

// What flags say before it is looked into together.
struct Texts {
  std::string model;
  client::LossScalerOptions scaler;
};

void AddTimeout(const std::string& name, absl::Duration& timeout, const std::string& help,
                CommandLine& line) {
  const auto take = [&timeout, name](const std::string& text) {
    // Abseil also reads "inf", with which a deadline, now + timeout, would overflow.
    if (!absl::ParseDuration(text, &timeout) || timeout < absl::Milliseconds(1) ||
        timeout > absl::Hours(24 * 7)) {
      throw CLI::ValidationError("--" + name, text + " is not from 1ms to 168h");
    }
  };
  line.Add(name, take, absl::FormatDuration(timeout), help);
}

void AddFlags(WorkerFlags& flags, Texts& texts, CommandLine& line) {
  WorkerOptions& options = flags.options;
  TrainerOptions& trainer = options.trainer;
  TrainingJobOptions& job = options.job;
  const std::map<std::string, DType> dtypes = {
      {"bf16", DType::kBFloat16}, {"fp16", DType::kFloat16}, {"fp32", DType::kFloat32}};
  line.Group("The run");
  line.Add("job", job.name, "Name of the job on the service, the same for all workers");
  line.Add("text", options.text,
           "The text to train on: a file, or a directory of plain files. Files named *.bin have "
           "GPT-2's tokens, as llm.c writes them");
  line.Add("steps", trainer.steps, "The last step of the run");
  line.Add("batch", trainer.batch, "Sequences in a micro-step, of all workers together");
  line.Add("micro-steps", trainer.micro_steps, "Backward passes a step");
  line.Add("seed", trainer.seed, "It determines first weights and batches");
  line.Add("resume", flags.resume,
           "A checkpoint to load first, if the job is new. NAME: the newest undamaged one of this "
           "name under the service's --checkpoint-dir, if there is one; so the flag may be set "
           "from the first start on. NAME/step-STEP or NAME/step-STEP.GENERATION: that one, which "
           "must exist. Or an absolute path on the service's host, if it accepts paths");
  line.Add("save", options.save_directory,
           "Where the service saves a new checkpoint at the end: a name or a path, as in --resume");
  line.Add("close-at-end", options.close_at_end,
           "At the end of the training, save the job (to --save, or to the folder of the job's "
           "name) and close it, which frees the service's memory");
  line.Add("out", options.out, "Directory for losses.csv, weights.bin and worker.json");
  line.Add("trace", flags.trace,
           "File for this worker's timeline, for ui.perfetto.dev; rank N above 0 writes FILE.N");
  line.Group("The model");
  line.Add("model", texts.model,
           "A model by name, instead of the sizes below: bytes, gpt2-124M, gpt2-350M, gpt2-774M or "
           "gpt2-1.5B");
  line.Add("layers", options.model.layers, "Transformer blocks");
  line.Add("heads", options.model.heads, "Attention heads");
  line.Add("width", options.model.width, "Width of the residual stream");
  line.Add("context", options.model.context, "Tokens in a sequence");
  line.Group("Learning");
  line.Add("lr", job.lr, "Peak learning rate");
  line.Add("warmup-steps", trainer.learning_rate.warmup_steps,
           "Steps in which the learning rate rises");
  line.Add("decay-end", trainer.learning_rate.decay_end,
           "The step at which the learning rate has fallen to a tenth; 0: --steps. Set it if you "
           "will resume the run with more steps");
  std::map<std::string, Rule> rules;
  for (const RuleRow& row : Rules()) rules[std::string(row.name)] = row.defaults.rule;
  line.Add("optimizer-rule", job.rule, rules,
           "The update rule. adam is AdamW; sgd has momentum 0.9; muon is for the matrices of the "
           "blocks, with AdamW for the rest, and its steps are as large as AdamW's");
  line.Add(
      "newton-schulz", job.newton_schulz,
      {{"service", Orthogonalizer::kService}, {"workers", Orthogonalizer::kWorkers}},
      "muon: who orthogonalizes. service: its processors; workers: their devices, and bits follow "
      "from these. Default: workers with --device=cuda");
  std::map<std::string, StateFormat> formats;
  for (const StateFormat format : kStateFormats) formats[std::string(Name(format))] = format;
  line.Add(
      "state", job.state, formats,
      "How the service holds the state of matrices and embeddings: with adam 12 bytes a "
      "parameter, 8 or 6.2. Biases, norms, matrices of fewer than 4,096 elements, and with muon "
      "those of the blocks have fp32");
  line.Add("weight-decay", job.weight_decay, "Of matrices and embeddings");
  line.Add("max-norm", trainer.max_norm,
           "Gradients are clipped to this global norm; 0: no clipping");
  line.Group("Where it computes");
  line.Add("device", flags.device, {{"cpu", DeviceKind::kCpu}, {"cuda", DeviceKind::kCuda}},
           "Where the passes run: cpu or cuda");
  line.Add("collective", flags.collective,
           {{"auto", CollectiveKind::kAuto},
            {"nccl", CollectiveKind::kNccl},
            {"gloo", CollectiveKind::kGloo}},
           "--device=cuda: how GPUs reduce and gather. nccl; gloo: through the hosts; auto: gloo "
           "if two workers share a GPU, which NCCL refuses, else nccl");
  line.Add("optimizer", flags.optimizer,
           {{"service", OptimizerKind::kService}, {"local", OptimizerKind::kLocal}},
           "Who applies the steps. service; local: this process, with the same bits, on the CPU by "
           "the scalar reference, on a GPU by its kernels");
  line.Add("threads", flags.threads, 1, std::numeric_limits<int>::max(),
           "Threads for this worker's arithmetic");
  // More than --seal-timeout, which bounds every wait for the service: the others wait in a
  // collective for a worker that waits for the service, and it must give up first. It knows the
  // reason; they only notice that it is late.
  AddTimeout("peer-timeout", flags.peer_timeout,
             "How long to wait for another worker before giving up. Default: five minutes more "
             "than --seal-timeout, so that a worker that waits for the service fails first",
             line);
  line.Group("The service");
  line.Add("service", flags.service,
           "The optimizer service: host:port, unix:/path, or in-process to run one inside this "
           "worker (one worker only). Or several that hold the job together: a:7070,b:7070, of "
           "which each gets consecutive workers in even shares, or node, the lasting service of "
           "each node at its unix socket, or etcd://HOST:PORT/PREFIX, services of a cluster. "
           "Default: BALLAST_SERVICE, or 127.0.0.1:7070, or the "
           "socket of the packaged service");
  line.Add("tls-ca", flags.credentials.tls_ca,
           "The authority of a TLS service's certificate (or BALLAST_TLS_CA)");
  line.Add("tls-cert", flags.credentials.tls_cert,
           "This worker's certificate (or BALLAST_TLS_CERT)");
  line.Add("tls-key", flags.credentials.tls_key, "Its key (or BALLAST_TLS_KEY)");
  line.Add("token-file", flags.credentials.token_file,
           "A file with a token, for TLS and unix sockets (or BALLAST_TOKEN_FILE)");
  line.Add(
      "shared-memory", flags.shared_memory,
      {{"auto", client::SharedMemoryUse::kAuto}, {"never", client::SharedMemoryUse::kNever}},
      "How gradients and weights travel. auto: through memory shared with a service on this host, "
      "if the service allows it; never: always through the connection. The bits are the same");
  line.Add("update", job.update_mode,
           {{"speculate", UpdateMode::kSpeculate}, {"wait", UpdateMode::kWait}},
           "When the service updates. speculate: during backward, if it has the memory; wait: "
           "after the decision. The bits are the same");
  line.Add("accumulate", options.accumulation,
           {{"service", Accumulation::kService}, {"worker", Accumulation::kWorker}},
           "Who sums a step's micro-steps. service; worker: it sends one gradient a step");
  line.Add("keep-previous", job.keep_previous,
           "The service keeps the state before the last step, for `ballast undo`; this takes "
           "memory for one more version");
  AddTimeout("seal-timeout", options.seal_timeout,
             "How long to wait for the service to accept a gradient, and for other workers to seal "
             "at the end of a step",
             line);
  AddTimeout("reconnect-timeout", flags.reconnect_timeout,
             "How long to retry a broken connection to the service before giving up", line);
  line.Group("Formats and messages");
  line.Add("dtype", job.weights_dtype, dtypes,
           "Weights from the service, for the model, and gradients to the service: bf16, fp16 "
           "(with dynamic loss scaling) or fp32");
  line.Add("wire-dtype", job.wire_dtype, dtypes,
           "Gradients to the service, if they differ from --dtype: bf16, fp16 or fp32");
  line.Add("bucket-elements", job.bucket_elements, "Elements of a reduce-scatter");
  line.Add("chunk-elements", job.chunk_elements, "Elements of a message");
  line.Add("check-gradients", options.check_gradients,
           "Search this worker's gradients for non-finite elements before the reduction, so that a "
           "skipped step names the worker");
  line.Group("The loss scale of fp16 gradients");
  line.Add("initial-scale-power", texts.scaler.initial_scale_power,
           "fp16 gradients: the first loss scale is 2 to this power");
  line.Add("loss-scale-window", texts.scaler.window,
           "fp16 gradients: steps without overflow before the loss scale doubles");
  line.Add("loss-scale-hysteresis", texts.scaler.hysteresis,
           "fp16 gradients: the number of overflows that halve the loss scale");
  line.Add("min-loss-scale", texts.scaler.min_scale,
           "fp16 gradients: the loss scale is never halved below this");
}

// The service reads and writes checkpoints; its working directory is not this worker's.
absl::Status CheckCheckpointPath(absl::string_view flag, absl::string_view path) {
  if (path.empty() || absl::StartsWith(path, "/") || IsCheckpointName(path)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, "=", path,
                   " must be a name under the service's --checkpoint-dir, one of the checkpoints "
                   "there, such as gpt/step-1000, or an absolute path on its host"));
}

// The flags as they were given.
struct Given {
  const CommandLine& line;
  std::map<std::string, std::string> defaults;

  // OK if `flags` have their defaults.
  absl::Status CheckUnused(std::initializer_list<const char*> flags,
                           absl::string_view error) const {
    for (const char* name : flags) {
      if (line.values().at(name) == defaults.at(name)) continue;
      return absl::InvalidArgumentError(absl::StrCat("--", name, " ", error));
    }
    return absl::OkStatus();
  }
};

// Flags that would have no effect are refused: who gives one expects some.
absl::Status CheckNumericFlags(const Given& given, const Texts& texts, WorkerFlags& flags) {
  TrainingJobOptions& job = flags.options.job;
  // Gradients travel in the format of the weights unless a flag says otherwise.
  if (!given.line.Has("wire-dtype")) job.wire_dtype = job.weights_dtype;
  if (flags.device == DeviceKind::kCuda && job.weights_dtype != DType::kBFloat16) {
    return absl::InvalidArgumentError(
        absl::StrCat("--dtype=", given.line.values().at("dtype"),
                     " needs --device=cpu; GPUs compute in bf16, and --wire-dtype may differ"));
  }
  // The wire's format decides, not the weights': small gradients become zero and large ones
  // infinite where they are rounded to fp16.
  if (job.wire_dtype == DType::kFloat16) {
    flags.options.trainer.loss_scaler = texts.scaler;
    return absl::OkStatus();
  }
  return given.CheckUnused(
      {"initial-scale-power", "loss-scale-window", "loss-scale-hysteresis", "min-loss-scale"},
      "needs fp16 gradients; give --dtype=fp16 or --wire-dtype=fp16");
}

absl::Status CheckModel(const Given& given, const Texts& texts, WorkerFlags& flags) {
  if (texts.model.empty()) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(given.CheckUnused({"layers", "heads", "width", "context"},
                                            "is part of --model; leave out one of them"));
  BALLAST_ASSIGN_OR_RETURN(flags.options.model, FindGptConfig(texts.model));
  return absl::OkStatus();
}

absl::Status CheckNewtonSchulz(const Given& given, WorkerFlags& flags) {
  TrainingJobOptions& job = flags.options.job;
  const bool is_given = given.line.Has("newton-schulz");
  if (job.rule != Rule::kMuon) {
    if (!is_given) return absl::OkStatus();
    return absl::InvalidArgumentError("--newton-schulz needs --optimizer-rule=muon");
  }
  if (!is_given && flags.device == DeviceKind::kCuda) job.newton_schulz = Orthogonalizer::kWorkers;
  return absl::OkStatus();
}

absl::Status CheckDeviceAndOptimizer(const Given& given, const WorkerFlags& flags) {
  if (flags.device == DeviceKind::kCpu) {
    BALLAST_RETURN_IF_ERROR(given.CheckUnused({"collective"}, "needs GPUs; give --device=cuda"));
  }
  if (flags.optimizer == OptimizerKind::kService) return absl::OkStatus();
  return given.CheckUnused({"resume", "save", "close-at-end", "service", "update", "optimizer-rule",
                            "state", "keep-previous", "shared-memory", "seal-timeout",
                            "reconnect-timeout", "tls-ca", "tls-cert", "tls-key", "token-file"},
                           "needs the service; give --optimizer=service");
}

// Looks into what the flags say together, and derives what follows from them.
absl::Status Check(const Given& given, const Texts& texts, WorkerFlags& flags) {
  WorkerOptions& options = flags.options;
  BALLAST_RETURN_IF_ERROR(CheckCheckpointPath("resume", flags.resume));
  BALLAST_RETURN_IF_ERROR(CheckCheckpointPath("save", options.save_directory));
  BALLAST_RETURN_IF_ERROR(CheckModel(given, texts, flags));
  BALLAST_RETURN_IF_ERROR(CheckNumericFlags(given, texts, flags));
  BALLAST_RETURN_IF_ERROR(CheckDeviceAndOptimizer(given, flags));
  BALLAST_RETURN_IF_ERROR(CheckNewtonSchulz(given, flags));
  const std::map<std::string, std::string>& values = given.line.values();
  options.backend_name = values.at("device");
  options.collective_name = values.at("collective");
  options.optimizer_name = values.at("optimizer");
  // The default follows --steps, so resuming with more of them changes the schedule. --decay-end
  // keeps it.
  LearningRateSchedule& rate = options.trainer.learning_rate;
  if (rate.decay_end == 0) rate.decay_end = options.trainer.steps;
  rate.peak = options.job.lr;
  options.resumes = !flags.resume.empty();
  if (options.close_at_end && options.save_directory.empty()) {
    options.save_directory = options.job.name;
  }
  if (!given.line.Has("peer-timeout")) flags.peer_timeout = options.seal_timeout + kPeersApart;
  if (flags.service.empty()) flags.service = client::DefaultService();
  if (flags.optimizer == OptimizerKind::kService) {
    const absl::StatusOr<std::vector<std::string>> services = ParseServices(flags.service);
    BALLAST_RETURN_IF_ERROR(Annotate(services.status(), "--service"));
    // A single service may have another address on each host.
    const bool is_on_all_alike =
        services->size() > 1 || flags.service == kNodeService || cluster::IsAddress(flags.service);
    options.services = is_on_all_alike ? absl::StrJoin(*services, ",") : "a single one";
  }
  flags.credentials = client::OrEnvironment(flags.credentials);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<WorkerFlags> ReadWorkerFlags(int argc, char** argv) {
  WorkerFlags flags;
  Texts texts;
  flags.options.trainer.learning_rate.decay_end = 0;
  flags.options.trainer.max_norm = 1;
  flags.reconnect_timeout = client::SessionOptions().reconnect_timeout;
  flags.peer_timeout = flags.options.seal_timeout + kPeersApart;
  CommandLine line("ballast-worker", kAbout, VersionAndBuild());
  AddFlags(flags, texts, line);
  const Given given = {.line = line, .defaults = line.values()};
  BALLAST_ASSIGN_OR_RETURN(const std::string answer, line.Parse({argv + 1, argv + argc}));
  if (!answer.empty()) {
    std::fputs(answer.c_str(), stdout);
    std::exit(0);
  }
  BALLAST_RETURN_IF_ERROR(Check(given, texts, flags));
  return flags;
}

}  // namespace ballast::worker
