#include "tests/upstream/offloaded_run.h"

#include <algorithm>
#include <deque>
#include <map>
#include <stdexcept>
#include <utility>

#include "tests/client/session/rank_for_tests.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/service_for_tests.h"

namespace ballast {
namespace {

constexpr int64_t kMemory = int64_t{256} << 20;

void Check(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());  // Fails the test, with its text.
}

// The parts of `tensors` that lie in a chunk; zeros elsewhere.
std::vector<float> PartIn(const Layout& layout, int chunk, const Tensors& tensors) {
  std::vector<float> values(layout.chunks()[chunk].elements, 0.0f);
  for (const ChunkPiece& piece : layout.Pieces(chunk)) {
    const auto found = tensors.find(piece.parameter);
    if (found == tensors.end()) continue;
    for (int64_t i = 0; i < piece.elements; ++i) {
      values[piece.chunk_offset + i] = found->second.at(piece.parameter_offset + i);
    }
  }
  return values;
}

std::vector<std::byte> Encode(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * SizeBytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) StoreElement(bytes.data(), dtype, i, values[i]);
  return bytes;
}

class EngineRun : public OffloadedRun {
 public:
  EngineRun(const JobSpec& spec, const Tensors& first_weights) : driver_(engine_, spec) {
    for (int c = 0; c < static_cast<int>(driver_.layout().chunks().size()); ++c) {
      const auto bytes = Encode(PartIn(driver_.layout(), c, first_weights), DType::kFloat32);
      const absl::Span<const std::byte> piece(bytes);
      Check(driver_.job().WriteInitialWeights(c, {&piece, 1}).status());
    }
    driver_.AttachAll();
  }

  void Begin(const StepSettings& settings) override {
    StepSettings with = settings;
    with.expected_clipping = vote().clipping;
    driver_.BeginAll(with);
  }
  void EndMicroStep(int rank, uint32_t micro_step, const UsedParameters& used) override {
    Check(driver_.stream(rank).EndMicroStep(driver_.next_step(), micro_step, used));
  }
  absl::Status Seal(int rank, uint32_t micro_steps) override {
    const auto refusal = driver_.stream(rank).Seal(driver_.next_step(), micro_steps, vote());
    if (!refusal.ok()) return refusal.status();
    return refusal->has_value() ? (*refusal)->status : absl::OkStatus();
  }
  absl::StatusOr<StepOutcome> SealAll(uint32_t micro_steps) override {
    const uint64_t step = driver_.next_step();
    for (int rank = 0; rank < driver_.layout().world_size(); ++rank) {
      if (absl::Status status = Seal(rank, micro_steps); !status.ok()) return status;
    }
    for (int rank = 0; rank < driver_.layout().world_size(); ++rank) {
      driver_.listener(rank).WaitForCommit(step);
    }
    return driver_.listener(0).outcomes().back();
  }
  void Load(const std::string& directory) override {
    Check(driver_.job().Load(directory).status());
    driver_.AttachAll();
  }
  Job& job() override { return driver_.job(); }

 protected:
  void Contribute(const Contribution& contribution) override {
    const int owner = driver_.layout().chunks()[contribution.chunk].rank;
    Check(driver_.stream(owner).Contribute(contribution).status());
  }
  std::vector<std::byte> Returned(int chunk) override {
    const Chunk& place = driver_.layout().chunks()[chunk];
    const DType dtype = driver_.job().spec().groups[place.group].return_dtype;
    std::vector<std::byte> bytes(place.elements * SizeBytes(dtype));
    const JobStatus status = driver_.job().Status();
    Check(driver_.job().ReadShard(status.generation, status.committed_step, chunk,
                                  absl::MakeSpan(bytes)));
    return bytes;
  }

 private:
  Engine engine_{{.memory_limit_bytes = kMemory, .threads = 2}};
  JobDriver driver_;
};

class ClientRun : public OffloadedRun {
 public:
  ClientRun(const JobSpec& spec, const Tensors& first_weights) : spec_(spec) {
    OpenAll();
    for (const auto& session : sessions_) {
      Check(session->UploadWeights([&](int chunk, absl::Span<float> out) {
        const std::vector<float> values = PartIn(session->layout(), chunk, first_weights);
        std::copy(values.begin(), values.end(), out.begin());
      }));
    }
    for (const auto& session : sessions_) Check(session->ReadWeights());
  }
  ~ClientRun() override { sessions_.clear(); }  // Before the memory that they borrow.

  void Begin(const StepSettings& settings) override {
    for (const auto& session : sessions_) {
      Check(session->BeginStep({.scale = settings.scale,
                                .overrides = settings.overrides,
                                .expected_clipping = vote().clipping}));
    }
  }
  void EndMicroStep(int rank, uint32_t micro_step, const UsedParameters& used) override {
    Check(sessions_[rank]->EndMicroStep(micro_step,
                                        {.all = used.all, .parameters = used.parameters}));
  }
  absl::Status Seal(int rank, uint32_t micro_steps) override {
    return sessions_[rank]->Seal(micro_steps, vote()).status();
  }
  absl::StatusOr<StepOutcome> SealAll(uint32_t micro_steps) override {
    std::vector<absl::StatusOr<client::StepDecision>> decisions(sessions_.size());
    client::ForEachRank(spec_.layout.world_size, [&](int rank) {
      decisions[rank] = sessions_[rank]->Seal(micro_steps, vote());
      if (!decisions[rank].ok()) return;
      const absl::Status received = sessions_[rank]->ReceiveWeights();
      if (!received.ok()) decisions[rank] = received;
    });
    for (const auto& decision : decisions) {
      if (!decision.ok()) return decision.status();
    }
    const client::StepDecision& said = *decisions[0];
    return StepOutcome{.step = said.step,
                       .decision = {.apply = said.applied,
                                    .norm = said.norm,
                                    .clip_coefficient = said.clip_coefficient},
                       .skip_reason = said.skip_reason,
                       .unused_parameters = said.unused_parameters};
  }
  void Load(const std::string& directory) override {
    Check(sessions_[0]->LoadCheckpoint(directory));
    OpenAll();
    for (const auto& session : sessions_) Check(session->ReadWeights());
  }
  Job& job() override { return *job_; }

 protected:
  void Contribute(const Contribution& contribution) override {
    client::GradientPush push;
    const int rank = job_->layout().chunks()[contribution.chunk].rank;
    push.chunk = static_cast<int>(contribution.chunk) - job_->layout().first_of_rank(rank);
    push.micro_step_begin = contribution.micro_step_begin;
    push.micro_step_end = contribution.micro_step_end;
    push.final = contribution.final;
    push.empty = contribution.empty;
    if (!contribution.empty) {
      const auto& payload = contribution.payload[0];
      push.payload = payloads_.emplace_back(payload.begin(), payload.end());
    }
    Check(sessions_[rank]->Push(std::move(push)));
  }
  std::vector<std::byte> Returned(int chunk) override { return memory_[chunk]; }

 private:
  void OpenAll() {
    sessions_.clear();
    const Layout layout = Layout::Create(spec_.layout).value();
    for (const Chunk& chunk : layout.chunks()) {
      memory_[static_cast<int>(&chunk - layout.chunks().data())].resize(
          chunk.elements * SizeBytes(spec_.groups[chunk.group].return_dtype));
    }
    for (int rank = 0; rank < spec_.layout.world_size; ++rank) {
      client::SessionOptions options;
      options.job = spec_;
      options.rank = rank;
      options.seal_timeout = absl::Minutes(4);  // A test that goes wrong ends, and says why.
      options.weights = [this, first = layout.first_of_rank(rank)](int chunk) {
        return absl::MakeSpan(memory_.at(first + chunk));
      };
      sessions_.push_back(client::Session::Open(service_.NewChannel(), std::move(options)).value());
    }
    job_ = service_.engine().FindJob(spec_.name).value();
  }

  const JobSpec spec_;
  ServiceForTests service_{Way::kInProcess};
  std::shared_ptr<Job> job_;
  std::map<int, std::vector<std::byte>> memory_;            // By chunk.
  std::deque<std::vector<std::byte>> payloads_;             // Lent to the sessions.
  std::vector<std::unique_ptr<client::Session>> sessions_;  // By rank.
};

}  // namespace

JobSpec InFloat32(JobSpec spec) {
  for (GroupSpec& group : spec.groups) {
    group.wire_dtype = DType::kFloat32;
    group.return_dtype = DType::kFloat32;
  }
  return spec;
}

JobSpec SpreadJob(const std::string& name, std::vector<ParameterSpec> parameters, int world_size) {
  JobSpec spec;
  spec.name = name;
  spec.layout.world_size = world_size;
  spec.layout.chunk_elements = kBlockElements;
  spec.layout.group_count = 0;
  for (const ParameterSpec& parameter : parameters) {
    spec.layout.group_count = std::max(spec.layout.group_count, parameter.group + 1);
  }
  spec.layout.parameters = std::move(parameters);
  const std::vector<int64_t> flat = FlatElements(spec.layout);
  for (int group = 0; group < spec.layout.group_count; ++group) {
    spec.groups.push_back({.name = "group" + std::to_string(group)});
    for (int64_t begin = 0; begin < flat[group]; begin += kBlockElements) {
      const int rank = static_cast<int>((group + begin / kBlockElements) % world_size);
      spec.layout.partitions.push_back(
          {.rank = rank, .group = group, .begin = begin, .end = begin + kBlockElements});
    }
  }
  return InFloat32(std::move(spec));
}

UsedParameters UsedIn(const Tensors& gradients) {
  UsedParameters used = {.all = false};
  for (const auto& [parameter, values] : gradients) used.parameters.push_back(parameter);
  return used;
}

std::unique_ptr<OffloadedRun> OffloadedRun::Start(Through through, const JobSpec& spec,
                                                  const Tensors& first_weights) {
  if (through == Through::kEngine) return std::make_unique<EngineRun>(spec, first_weights);
  return std::make_unique<ClientRun>(spec, first_weights);
}

absl::StatusOr<StepOutcome> OffloadedRun::Step(const Backwards& backwards,
                                               const StepSettings& settings, Accumulation where) {
  const auto micro_steps = static_cast<uint32_t>(backwards.size());
  const int world_size = job().layout().world_size();
  Begin(settings);
  std::vector<Tensors> sums(world_size);  // On the workers.
  for (uint32_t m = 0; m < micro_steps; ++m) {
    const bool last = m + 1 == micro_steps;
    for (int rank = 0; rank < world_size; ++rank) AddTo(sums[rank], backwards[m][rank]);
    for (int owner = 0; owner < world_size; ++owner) {
      if (where == Accumulation::kInService) Send(owner, backwards[m], m, m + 1, last);
      if (where == Accumulation::kOnWorker && last) Send(owner, sums, 0, micro_steps, true);
    }
    for (int rank = 0; rank < world_size; ++rank) {
      EndMicroStep(rank, m, UsedIn(backwards[m][rank]));
    }
  }
  return SealAll(micro_steps);
}

void OffloadedRun::Send(int owner, const std::vector<Tensors>& ranks, uint32_t micro_step_begin,
                        uint32_t micro_step_end, bool final) {
  const Layout& layout = job().layout();
  Tensors sum;
  for (const Tensors& rank : ranks) AddTo(sum, rank);
  for (const int chunk : layout.chunks_of_rank(owner)) {
    bool touched = false;
    for (const ChunkPiece& piece : layout.Pieces(chunk)) touched |= sum.contains(piece.parameter);
    const DType dtype = job().spec().groups[layout.chunks()[chunk].group].wire_dtype;
    const std::vector<std::byte> bytes = Encode(PartIn(layout, chunk, sum), dtype);
    const absl::Span<const std::byte> piece(bytes);
    Contribution contribution = {.step = job().Status().committed_step + 1,
                                 .chunk = chunk,
                                 .micro_step_begin = micro_step_begin,
                                 .micro_step_end = micro_step_end,
                                 .final = final,
                                 .empty = !touched};
    if (touched) contribution.payload = {&piece, 1};
    Contribute(contribution);
  }
}

Tensors OffloadedRun::Weights() {
  const Layout& layout = job().layout();
  Tensors weights = State(Plane::kMaster);  // For the shapes.
  for (int chunk = 0; chunk < static_cast<int>(layout.chunks().size()); ++chunk) {
    const std::vector<std::byte> bytes = Returned(chunk);
    const DType dtype = job().spec().groups[layout.chunks()[chunk].group].return_dtype;
    for (const ChunkPiece& piece : layout.Pieces(chunk)) {
      for (int64_t i = 0; i < piece.elements; ++i) {
        weights[piece.parameter][piece.parameter_offset + i] =
            LoadElement(bytes.data(), dtype, piece.chunk_offset + i);
      }
    }
  }
  return weights;
}

Tensors OffloadedRun::State(Plane plane) {
  const Layout& layout = job().layout();
  Tensors state;
  for (int p = 0; p < static_cast<int>(layout.spec().parameters.size()); ++p) {
    if (!layout.spec().parameters[p].trainable) continue;
    const Snapshot snapshot = job().TakeSnapshot({p}).value();
    if (!snapshot.has_plane(p, plane)) continue;
    std::vector<float>& values = state[p];
    values.resize(layout.place(p).elements);
    snapshot.Read(p, plane, 0, absl::MakeSpan(values));
  }
  return state;
}

}  // namespace ballast
