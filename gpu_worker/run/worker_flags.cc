#include "gpu_worker/run/worker_flags.h"

#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/types/span.h"
#include "client/default_service.h"
#include "client/loss_scaler.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "cpu_optimizer_service/common/text/checkpoint_name.h"
#include "gpu_worker/gpt/architecture.h"

ABSL_FLAG(std::string, service, "",
          "The optimizer service: host:port, unix:/path, or in-process to run one inside this "
          "worker (one worker only). Default: BALLAST_SERVICE, or "
          "127.0.0.1:7070, or the socket of the packaged service");
ABSL_FLAG(
    std::string, tls_ca, "",
    "The authority that has signed the certificate of a service with TLS (or BALLAST_TLS_CA)");
ABSL_FLAG(std::string, tls_cert, "", "This worker's certificate (or BALLAST_TLS_CERT)");
ABSL_FLAG(std::string, tls_key, "", "Its key (or BALLAST_TLS_KEY)");
ABSL_FLAG(std::string, token_file, "",
          "A file with a token, for TLS and unix sockets (or BALLAST_TOKEN_FILE)");
ABSL_FLAG(
    std::string, optimizer, "service",
    "Who applies the steps: service; or local, this process, with the same bits: on the CPU by "
    "the scalar reference, on a GPU by its kernels");
ABSL_FLAG(std::string, device, "cpu", "Where the passes run: cpu or cuda");
ABSL_FLAG(
    std::string, collective, "auto",
    "--device=cuda: how GPUs reduce and gather: nccl; gloo, through the hosts; or auto, gloo where "
    "two workers share a GPU, which NCCL refuses");
ABSL_FLAG(std::string, job, "gpt", "Name of the job on the service, the same for all workers");
ABSL_FLAG(
    std::string, text, ballast::worker::kDefaultText,
    "The text to train on: a file, or a directory of plain files; with names that end in .bin "
    "files of GPT-2's tokens, as llm.c writes them");
ABSL_FLAG(uint64_t, steps, 80, "The last step of the run");
ABSL_FLAG(uint64_t, warmup_steps, 10, "Steps in which the learning rate rises");
ABSL_FLAG(
    uint64_t, decay_end, 0,
    "The step at which the learning rate has fallen to a tenth; 0: --steps. Give it to runs that "
    "are to be resumed with more steps");
ABSL_FLAG(uint32_t, micro_steps, 2, "Backward passes a step");
ABSL_FLAG(int, batch, 12, "Sequences in a micro-step, of all workers together");
ABSL_FLAG(std::string, model, "",
          "A model by its name, instead of the sizes below: bytes, gpt2-124M, gpt2-350M, gpt2-774M "
          "or gpt2-1.5B");
ABSL_FLAG(int, context, 128, "Tokens in a sequence");
ABSL_FLAG(int, layers, 4, "Transformer blocks");
ABSL_FLAG(int, width, 256, "Width of the residual stream");
ABSL_FLAG(int, heads, 4, "Attention heads");
ABSL_FLAG(uint64_t, seed, 1, "First weights and batches are functions of it");
ABSL_FLAG(double, lr, 1e-3, "Peak learning rate");
ABSL_FLAG(double, weight_decay, 0.1, "Of matrices and embeddings");
ABSL_FLAG(double, max_norm, 1.0, "Gradients are clipped to this global norm; 0: not");
ABSL_FLAG(int64_t, bucket_elements, int64_t{1} << 19, "Elements of a reduce-scatter");
ABSL_FLAG(int64_t, chunk_elements, ballast::kMaxChunkElements, "Elements of a message");
ABSL_FLAG(
    std::string, accumulate, "service",
    "Who sums a step's micro-steps: service, or worker, which then sends one gradient a step");
ABSL_FLAG(std::string, dtype, "bf16",
          "Weights from the service, with which the model computes, and gradients to "
          "the service: bf16, fp16 (with dynamic loss scaling) or fp32");
ABSL_FLAG(std::string, wire_dtype, "",
          "Gradients to the service, where they differ from --dtype: bf16, fp16 or "
          "fp32");
ABSL_FLAG(int, initial_scale_power, ballast::client::LossScalerOptions().initial_scale_power,
          "fp16 gradients: the first loss scale is 2 to this power");
ABSL_FLAG(int64_t, loss_scale_window, ballast::client::LossScalerOptions().window,
          "fp16 gradients: steps without overflow before the loss scale doubles");
ABSL_FLAG(int, loss_scale_hysteresis, ballast::client::LossScalerOptions().hysteresis,
          "fp16 gradients: overflows that it takes to halve the loss scale");
ABSL_FLAG(float, min_loss_scale, ballast::client::LossScalerOptions().min_scale,
          "fp16 gradients: the loss scale is never halved below this");
ABSL_FLAG(
    bool, check_gradients, false,
    "Search this worker's gradients for elements that are not finite before they are reduced, "
    "so that a skipped step names the worker");
ABSL_FLAG(
    std::string, update, "speculate",
    "When the service updates: speculate, while backward still runs, where it has the memory; "
    "or wait, for the decision. The bits are the same");
ABSL_FLAG(bool, keep_previous, false,
          "Have the service keep the state before the last step, for `ballast undo`; takes memory "
          "for one more version of it there");
ABSL_FLAG(
    std::string, shared_memory, "auto",
    "How gradients and weights travel: auto, through memory shared with a service on this host "
    "where that allows it; or never, always through the connection. The bits are the same");
ABSL_FLAG(std::string, out, "", "Directory for losses.csv, weights.bin and worker.json");
ABSL_FLAG(
    bool, write_weights, true,
    "weights.bin in --out; false: only its hash, in worker.json, for a run that is measured or "
    "compared");
ABSL_FLAG(
    std::string, trace, "",
    "File for this worker's timeline, which ui.perfetto.dev shows; rank N except 0 writes FILE.N");
ABSL_FLAG(std::string, resume, "",
          "A checkpoint to load first, if the job is new and there is one: a name under the "
          "service's --checkpoint-dir, of which the newest good one is taken, and which may stand "
          "here from the first start on; one of these, NAME/step-STEP or "
          "NAME/step-STEP.GENERATION, which must be there; or an absolute path on its host, if it "
          "takes paths");
ABSL_FLAG(std::string, save, "",
          "Where the service saves a new checkpoint at the end: a name or a path, as for --resume");
ABSL_FLAG(
    bool, close_at_end, false,
    "At the end of the training, save the job (where --save says, or in the folder of the job's "
    "name) and close it, so that the service has its memory back");
ABSL_FLAG(int, threads, 1, "Threads for this worker's arithmetic");
// More than --seal-timeout, which bounds every wait for the service: the others wait in a
// collective for a worker that waits for the service, and it must give up first. It knows the
// reason; they only notice that it is late.
ABSL_FLAG(std::optional<absl::Duration>, peer_timeout, std::nullopt,
          "How long to wait for another worker before giving up; if it is not given, five minutes "
          "more than --seal-timeout, so that a worker that waits for the service fails first");
ABSL_FLAG(absl::Duration, reconnect_timeout, ballast::client::SessionOptions().reconnect_timeout,
          "How long a broken connection to the service is tried again before giving up");
ABSL_FLAG(
    absl::Duration, seal_timeout, ballast::client::SessionOptions().seal_timeout,
    "How long to wait for the service: to take a gradient, and, at the end of a step, for the "
    "other workers to seal it");

namespace ballast::worker {
namespace {

// Abseil also reads "inf", with which a deadline, now + timeout, would overflow.
constexpr absl::Duration kMaxTimeout = absl::Hours(24 * 7);
// How far apart workers may be when one begins to wait for the service and others for it.
constexpr absl::Duration kPeersApart = absl::Minutes(5);

// Abseil parses the flags, once; it knows names with underscores only, so "--micro-steps=2" is
// first changed in place to "--micro_steps=2".
void NameFlagsAsAbseilDoes(absl::Span<char* const> arguments) {
  for (char* const argument : arguments) {
    if (!absl::StartsWith(argument, "--")) continue;
    for (char* c = argument + 2; *c != '\0' && *c != '='; ++c) {
      // The loop ends at the "=": values keep their dashes.
      if (*c == '-') *c = '_';
    }
  }
}

// The value that the flag's word stands for.
template <typename T>
absl::StatusOr<T> Choose(absl::string_view flag, const std::string& word,
                         const std::vector<std::pair<absl::string_view, T>>& choices) {
  std::vector<absl::string_view> words;
  for (const auto& [name, value] : choices) {
    if (word == name) return value;
    words.push_back(name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, "=", word, " must be ", absl::StrJoin(words, " or ")));
}

absl::StatusOr<DType> ChooseDType(absl::string_view flag, const std::string& word) {
  return Choose<DType>(
      flag, word,
      {{"bf16", DType::kBFloat16}, {"fp16", DType::kFloat16}, {"fp32", DType::kFloat32}});
}

absl::Status CheckTimeout(absl::string_view flag, absl::Duration timeout) {
  if (timeout >= absl::Milliseconds(1) && timeout <= kMaxTimeout) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", absl::FormatDuration(timeout),
                                                 " must be between 1ms and ",
                                                 absl::FormatDuration(kMaxTimeout)));
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

// `flags`, by their names in Abseil, are at their defaults, or `error`.
absl::Status CheckUnused(std::initializer_list<absl::string_view> flags, absl::string_view error) {
  for (const absl::string_view name : flags) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    // A flag that was given with its default value is not noticed, and changes nothing.
    if (flag->CurrentValue() == flag->DefaultValue()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--", absl::StrReplaceAll(name, {{"_", "-"}}), " ", error));
  }
  return absl::OkStatus();
}

absl::Status CheckNumbers() {
  if (absl::GetFlag(FLAGS_threads) < 1) {
    return absl::InvalidArgumentError("--threads must be at least 1");
  }
  if (const auto timeout = absl::GetFlag(FLAGS_peer_timeout); timeout.has_value()) {
    BALLAST_RETURN_IF_ERROR(CheckTimeout("peer-timeout", *timeout));
  }
  BALLAST_RETURN_IF_ERROR(CheckTimeout("seal-timeout", absl::GetFlag(FLAGS_seal_timeout)));
  BALLAST_RETURN_IF_ERROR(
      CheckTimeout("reconnect-timeout", absl::GetFlag(FLAGS_reconnect_timeout)));
  BALLAST_RETURN_IF_ERROR(CheckCheckpointPath("resume", absl::GetFlag(FLAGS_resume)));
  return CheckCheckpointPath("save", absl::GetFlag(FLAGS_save));
}

absl::Status TakeNumericFlags(WorkerOptions& options) {
  BALLAST_ASSIGN_OR_RETURN(options.job.weights_dtype,
                           ChooseDType("dtype", absl::GetFlag(FLAGS_dtype)));
  // Gradients travel in the format of the weights unless a flag says otherwise.
  options.job.wire_dtype = options.job.weights_dtype;
  if (const std::string wire = absl::GetFlag(FLAGS_wire_dtype); !wire.empty()) {
    BALLAST_ASSIGN_OR_RETURN(options.job.wire_dtype, ChooseDType("wire-dtype", wire));
  }
  // The wire's format decides, not the weights': small gradients become zero and large ones
  // infinite where they are rounded to fp16.
  if (options.job.wire_dtype == DType::kFloat16) {
    options.trainer.loss_scaler = {
        .initial_scale_power = absl::GetFlag(FLAGS_initial_scale_power),
        .window = absl::GetFlag(FLAGS_loss_scale_window),
        .hysteresis = absl::GetFlag(FLAGS_loss_scale_hysteresis),
        .min_scale = absl::GetFlag(FLAGS_min_loss_scale),
    };
    return absl::OkStatus();
  }
  // A flag that would have no effect is refused: who gives it expects one.
  return CheckUnused(
      {"initial_scale_power", "loss_scale_window", "loss_scale_hysteresis", "min_loss_scale"},
      "is for fp16 gradients; use it with --dtype=fp16 or --wire-dtype=fp16");
}

absl::StatusOr<GptConfig> ModelOfFlags() {
  const std::string name = absl::GetFlag(FLAGS_model);
  if (name.empty()) {
    return GptConfig{.layers = absl::GetFlag(FLAGS_layers),
                     .heads = absl::GetFlag(FLAGS_heads),
                     .width = absl::GetFlag(FLAGS_width),
                     .context = absl::GetFlag(FLAGS_context)};
  }
  BALLAST_RETURN_IF_ERROR(CheckUnused({"layers", "heads", "width", "context"},
                                      "is part of --model; leave out one of them"));
  return FindGptConfig(name);
}

absl::StatusOr<WorkerOptions> OptionsOfFlags() {
  WorkerOptions options;
  BALLAST_ASSIGN_OR_RETURN(options.model, ModelOfFlags());
  options.trainer.micro_steps = absl::GetFlag(FLAGS_micro_steps);
  options.trainer.batch = absl::GetFlag(FLAGS_batch);
  options.trainer.seed = absl::GetFlag(FLAGS_seed);
  options.trainer.learning_rate.peak = absl::GetFlag(FLAGS_lr);
  options.trainer.learning_rate.warmup_steps = absl::GetFlag(FLAGS_warmup_steps);
  options.trainer.steps = absl::GetFlag(FLAGS_steps);
  const uint64_t decay_end = absl::GetFlag(FLAGS_decay_end);
  // The default follows --steps, so resuming with more of them changes the schedule. --decay-end
  // keeps it.
  options.trainer.learning_rate.decay_end = decay_end > 0 ? decay_end : options.trainer.steps;
  options.job.name = absl::GetFlag(FLAGS_job);
  options.job.lr = absl::GetFlag(FLAGS_lr);
  options.job.weight_decay = absl::GetFlag(FLAGS_weight_decay);
  options.trainer.max_norm = absl::GetFlag(FLAGS_max_norm);
  options.job.bucket_elements = absl::GetFlag(FLAGS_bucket_elements);
  options.job.chunk_elements = absl::GetFlag(FLAGS_chunk_elements);
  BALLAST_RETURN_IF_ERROR(TakeNumericFlags(options));
  BALLAST_ASSIGN_OR_RETURN(options.accumulation,
                           Choose<Accumulation>("accumulate", absl::GetFlag(FLAGS_accumulate),
                                                {{"service", Accumulation::kService},
                                                 {"worker", Accumulation::kWorker}}));
  BALLAST_ASSIGN_OR_RETURN(
      options.job.update_mode,
      Choose<UpdateMode>("update", absl::GetFlag(FLAGS_update),
                         {{"speculate", UpdateMode::kSpeculate}, {"wait", UpdateMode::kWait}}));
  options.job.keep_previous = absl::GetFlag(FLAGS_keep_previous);
  options.check_gradients = absl::GetFlag(FLAGS_check_gradients);
  options.text = absl::GetFlag(FLAGS_text);
  options.optimizer_name = absl::GetFlag(FLAGS_optimizer);
  options.seal_timeout = absl::GetFlag(FLAGS_seal_timeout);
  options.resumes = !absl::GetFlag(FLAGS_resume).empty();
  options.out = absl::GetFlag(FLAGS_out);
  options.weights_file =
      absl::GetFlag(FLAGS_write_weights) ? WeightsFile::kWritten : WeightsFile::kHashedOnly;
  options.save_directory = absl::GetFlag(FLAGS_save);
  options.close_at_end = absl::GetFlag(FLAGS_close_at_end);
  if (options.close_at_end && options.save_directory.empty()) {
    options.save_directory = options.job.name;
  }
  return options;
}

absl::Status CheckForDevice(const WorkerFlags& flags) {
  if (flags.device == DeviceKind::kCpu) {
    return CheckUnused({"collective"}, "is for GPUs; use it with --device=cuda");
  }
  if (flags.options.job.weights_dtype == DType::kBFloat16) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--dtype=", absl::GetFlag(FLAGS_dtype),
                   " is for --device=cpu; GPUs compute in bf16, and --wire-dtype may differ"));
}

absl::Status CheckForOptimizer(const WorkerFlags& flags) {
  if (flags.optimizer == OptimizerKind::kService) return absl::OkStatus();
  return CheckUnused(
      {"resume", "save", "close_at_end", "service", "update", "keep_previous", "shared_memory",
       "seal_timeout", "reconnect_timeout", "tls_ca", "tls_cert", "tls_key", "token_file"},
      "is for the service; use it with --optimizer=service");
}

absl::StatusOr<WorkerFlags> CheckedFlags() {
  BALLAST_RETURN_IF_ERROR(CheckNumbers());
  WorkerFlags flags;
  BALLAST_ASSIGN_OR_RETURN(flags.options, OptionsOfFlags());
  BALLAST_ASSIGN_OR_RETURN(
      flags.device, Choose<DeviceKind>("device", absl::GetFlag(FLAGS_device),
                                       {{"cpu", DeviceKind::kCpu}, {"cuda", DeviceKind::kCuda}}));
  BALLAST_ASSIGN_OR_RETURN(flags.collective,
                           Choose<CollectiveKind>("collective", absl::GetFlag(FLAGS_collective),
                                                  {{"auto", CollectiveKind::kAuto},
                                                   {"nccl", CollectiveKind::kNccl},
                                                   {"gloo", CollectiveKind::kGloo}}));
  BALLAST_ASSIGN_OR_RETURN(flags.optimizer,
                           Choose<OptimizerKind>("optimizer", absl::GetFlag(FLAGS_optimizer),
                                                 {{"service", OptimizerKind::kService},
                                                  {"local", OptimizerKind::kLocal}}));
  BALLAST_ASSIGN_OR_RETURN(
      flags.shared_memory,
      Choose<client::SharedMemoryUse>(
          "shared-memory", absl::GetFlag(FLAGS_shared_memory),
          {{"auto", client::SharedMemoryUse::kAuto}, {"never", client::SharedMemoryUse::kNever}}));
  BALLAST_RETURN_IF_ERROR(CheckForDevice(flags));
  BALLAST_RETURN_IF_ERROR(CheckForOptimizer(flags));
  flags.options.backend_name = absl::GetFlag(FLAGS_device);
  flags.options.collective_name = absl::GetFlag(FLAGS_collective);
  flags.service = absl::GetFlag(FLAGS_service);
  if (flags.service.empty()) flags.service = client::DefaultService();
  flags.credentials = client::OrEnvironment({.tls_ca = absl::GetFlag(FLAGS_tls_ca),
                                             .tls_cert = absl::GetFlag(FLAGS_tls_cert),
                                             .tls_key = absl::GetFlag(FLAGS_tls_key),
                                             .token_file = absl::GetFlag(FLAGS_token_file)});
  flags.resume = absl::GetFlag(FLAGS_resume);
  flags.reconnect_timeout = absl::GetFlag(FLAGS_reconnect_timeout);
  // It is longer than the wait for the service, for the reason given at the flag.
  flags.peer_timeout =
      absl::GetFlag(FLAGS_peer_timeout).value_or(flags.options.seal_timeout + kPeersApart);
  flags.trace = absl::GetFlag(FLAGS_trace);
  flags.threads = absl::GetFlag(FLAGS_threads);
  return flags;
}

}  // namespace

absl::StatusOr<WorkerFlags> ReadWorkerFlags(int argc, char** argv) {
  NameFlagsAsAbseilDoes(absl::MakeSpan(argv, argc));
  absl::FlagsUsageConfig usage;  // --help lists the flags of this file, not those of libraries.
  usage.contains_help_flags = [](absl::string_view file) {
    return absl::EndsWith(file, "worker_flags.cc");
  };
  usage.version_string = [] { return absl::StrCat("ballast-worker ", VersionAndBuild(), "\n"); };
  absl::SetFlagsUsageConfig(usage);
  const std::vector<char*> words = absl::ParseCommandLine(argc, argv);
  // The first is the name of the program.
  if (words.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("unexpected argument '", words[1], "'; flags begin with --, see --help"));
  }
  return CheckedFlags();
}

}  // namespace ballast::worker
