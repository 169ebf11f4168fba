// Sessions of ranks whose parameters are sharded over a mesh, against a real service: what they get
// is the training of one rank that has all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "client/session.h"
#include "cpu_optimizer_service/common/reason.h"
#include "tests/client/job_for_tests.h"
#include "tests/client/session/rank_for_tests.h"
#include "tests/client/session/reference_run.h"
#include "tests/support/messages.h"
#include "tests/support/service_for_tests.h"

namespace ballast::client {
namespace {

constexpr uint32_t kMicroSteps = 2;
constexpr Placement kReplicate;
constexpr Placement kShard0 = {.shard_dim = 0};
constexpr Placement kShard1 = {.shard_dim = 1};

// SmallJob on four ranks: "wte" by rows and columns, "h.0.w" by rows of two replicas, "h.0.b" on
// one.
JobSpec MeshJob(const std::string& name) {
  JobSpec job = SmallJob(name, 4);
  job.layout.partitions.clear();
  job.layout.mesh = {{"dp", 2}, {"tp", 2}};
  job.layout.parameters[0].placements = {kShard0, kShard1};
  job.layout.parameters[1].placements = {kReplicate, kShard0};
  job.layout.parameters[2].placements = {kReplicate, kReplicate};
  return job;
}

// A rank whose values are those of the flat spaces that one rank would have.
class MeshRank {
 public:
  MeshRank(const JobSpec& job, int rank) : job_(job), rank_(rank) {}
  ~MeshRank() { session_.reset(); }  // Destroyed before the memory that it borrows.

  absl::Status Join(std::shared_ptr<grpc::Channel> channel, Traffic traffic) {
    SessionOptions options = {.job = job_, .rank = rank_};
    if (traffic != Traffic::kInPlace) {
      options.weights = [this](int chunk) {
        std::string& memory = memory_[chunk];
        memory.resize(session_layout_.chunks()[chunk].elements * 4);
        return absl::MakeSpan(reinterpret_cast<std::byte*>(memory.data()), WeightBytes(chunk));
      };
    }
    if (traffic == Traffic::kPayloads) options.shared_memory = SharedMemoryUse::kNever;
    BALLAST_ASSIGN_OR_RETURN(session_, Session::Open(std::move(channel), std::move(options)));
    if (session_->shares_memory() != (traffic != Traffic::kPayloads) && !chunks().empty()) {
      return absl::FailedPreconditionError(absl::StrCat("not as ", client::Name(traffic)));
    }
    if (session_->awaiting_weights()) {
      BALLAST_RETURN_IF_ERROR(session_->UploadWeights([&](int chunk, absl::Span<float> out) {
        std::fill(out.begin(), out.end(), 0.0f);
        VisitElements(chunk, [&](int64_t at, int group, int64_t element) {
          out[at] = FirstWeight(flat_, group, element);
        });
      }));
    }
    return session_->ReadWeights();
  }

  absl::StatusOr<StepDecision> Step(const StepSettings& settings) {
    BALLAST_RETURN_IF_ERROR(session_->BeginStep(settings));
    for (uint32_t m = 0; m < kMicroSteps; ++m) {
      for (const int chunk : chunks()) BALLAST_RETURN_IF_ERROR(Push(chunk, m));
      BALLAST_RETURN_IF_ERROR(session_->EndMicroStep(m, {}));
    }
    BALLAST_ASSIGN_OR_RETURN(StepDecision decision, session_->Seal(kMicroSteps, SmallVote()));
    BALLAST_RETURN_IF_ERROR(session_->ReceiveWeights());
    return decision;
  }

  void ExpectWeightsOf(const ReferenceRun& reference) {
    for (const int chunk : chunks()) {
      const absl::Span<const std::byte> got =
          memory_.contains(chunk)
              ? absl::MakeConstSpan(reinterpret_cast<const std::byte*>(memory_.at(chunk).data()),
                                    WeightBytes(chunk))
              : session_->weights_memory(chunk);
      for (const ChunkPiece& piece : session_->layout().Pieces(chunk)) {
        const int group = job_.layout.parameters[piece.parameter].group;
        const int64_t size = SizeBytes(job_.groups[group].return_dtype);
        const std::string expected = reference.Weights(
            {.group = group,
             .begin = flat_.place(piece.parameter).offset + piece.parameter_offset,
             .elements = piece.elements});
        EXPECT_EQ(
            std::memcmp(got.data() + piece.chunk_offset * size, expected.data(), expected.size()),
            0)
            << "rank " << rank_ << " chunk " << chunk << " parameter " << piece.parameter;
      }
    }
  }

  Session& session() { return *session_; }
  absl::Span<const int> chunks() const { return session_layout_.chunks_of_rank(rank_); }

 private:
  size_t WeightBytes(int chunk) const {
    const Chunk& place = session_layout_.chunks()[chunk];
    return place.elements * SizeBytes(job_.groups[place.group].return_dtype);
  }
  // visit(place in the chunk, group, element of the group's flat space)
  void VisitElements(int chunk, const std::function<void(int64_t, int, int64_t)>& visit) const {
    for (const ChunkPiece& piece : session_layout_.Pieces(chunk)) {
      const int64_t offset = flat_.place(piece.parameter).offset + piece.parameter_offset;
      for (int64_t i = 0; i < piece.elements; ++i) {
        visit(piece.chunk_offset + i, job_.layout.parameters[piece.parameter].group, offset + i);
      }
    }
  }
  absl::Status Push(int chunk, uint32_t micro_step) {
    const Chunk& place = session_layout_.chunks()[chunk];
    const DType dtype = job_.groups[place.group].wire_dtype;
    std::string& bytes = pushed_.emplace_back(place.elements * SizeBytes(dtype), '\0');
    const uint64_t step = session_->committed_step() + 1;
    VisitElements(chunk, [&](int64_t at, int group, int64_t element) {
      StoreElement(bytes.data(), dtype, at, Gradient(flat_, step, micro_step, group, element));
    });
    return session_->Push(
        {.chunk = chunk,
         .micro_step_begin = micro_step,
         .micro_step_end = micro_step + 1,
         .final = micro_step + 1 == kMicroSteps,
         .payload = {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}});
  }

  const JobSpec job_;
  const int rank_;
  const Layout flat_ = Layout::Create(SmallJob("flat", 1).layout).value();
  const Layout session_layout_ = Layout::CreateForRanks(job_.layout, {rank_}).value();
  std::map<int, std::string> memory_;  // By chunk: of its weights.
  std::deque<std::string> pushed_;
  std::unique_ptr<Session> session_;
};

class MeshSessionTest : public testing::TestWithParam<std::tuple<Traffic, UpdateMode>> {};

TEST_P(MeshSessionTest, WeightsAndNormsAreThoseOfOneRankWithAll) {
  const auto [traffic, mode] = GetParam();
  ServiceForTests service(Way::kUnixSocket);
  JobSpec job = MeshJob("mesh");
  job.update_mode = mode;
  ForEachRank(4, [&, traffic = traffic](int rank) {
    MeshRank self(job, rank);
    const absl::Status joined = self.Join(service.NewChannel(), traffic);
    ASSERT_TRUE(joined.ok()) << joined;
    ReferenceRun reference(SmallJob("reference", 1));
    self.ExpectWeightsOf(reference);
    const StepSettings settings = {.scale = {.loss_scale = 4, .divisors = {8, 16}}};
    for (uint64_t step = 1; step <= 3; ++step) {
      const absl::StatusOr<StepDecision> decision = self.Step(settings);
      ASSERT_TRUE(decision.ok()) << decision.status();
      const Decision expected = reference.Step(step, kMicroSteps, settings.scale);
      EXPECT_EQ(decision->norm, expected.norm);
      EXPECT_EQ(decision->clip_coefficient, expected.clip_coefficient);
      self.ExpectWeightsOf(reference);
    }
    ASSERT_TRUE(self.session().ReadWeights().ok());
    self.ExpectWeightsOf(reference);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Traffics, MeshSessionTest,
    testing::Combine(testing::Values(Traffic::kPayloads, Traffic::kCopied, Traffic::kInPlace),
                     testing::Values(UpdateMode::kWait, UpdateMode::kSpeculate)),
    [](const auto& info) {
      return Name(std::get<Traffic>(info.param)) +
             (std::get<UpdateMode>(info.param) == UpdateMode::kWait ? "Wait" : "Speculate");
    });

TEST(MeshSession, AnotherPlacementIsRefusedWithItsName) {
  ServiceForTests service(Way::kUnixSocket);
  ASSERT_TRUE(service.engine().CreateJob(MeshJob("mesh")).ok());
  JobSpec other = MeshJob("mesh");
  other.layout.parameters[1].placements = {kShard0, kReplicate};
  const absl::Status status =
      Session::Open(service.NewChannel(), {.job = other, .rank = 1}).status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kFailedPrecondition, reason::kOtherDescription))
      << status;
}

}  // namespace
}  // namespace ballast::client
