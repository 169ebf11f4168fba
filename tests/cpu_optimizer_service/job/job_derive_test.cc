// Jobs that go on from another one, or from a checkpoint, with other parameters.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/engine.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

constexpr uint64_t kFirstSeed = 9;  // Of first weights of derived jobs.

class JobDeriveTest : public JobDriverTest {
 protected:
  // p0 to p2 in group0, p3 with amsgrad in group1.
  static JobSpec Before() {
    JobSpec spec = MakeJobSpec({.group_sizes = {{700, 24, 1500}, {600}},
                                .world_size = 2,
                                .bucket_elements = 1024,
                                .chunk_elements = 512});
    spec.groups[1].hyper_parameters.amsgrad = true;
    return spec;
  }
  // p1 is gone, p2 has another shape, "new" comes, and groups, ranks and chunks are others.
  static JobSpec After() {
    JobSpec spec = MakeJobSpec({.group_sizes = {{600}, {300, 700, 900}},
                                .world_size = 1,
                                .bucket_elements = 4096,
                                .chunk_elements = 256});
    spec.groups[0].name = "group1";
    spec.groups[0].hyper_parameters.amsgrad = true;
    spec.groups[1].name = "group0";
    const std::vector<std::string> names = {"p3", "new", "p0", "p2"};
    for (size_t p = 0; p < names.size(); ++p) spec.layout.parameters[p].name = names[p];
    return spec;
  }
  static Derivation From(const Job& job) { return {.uid = job.uid(), .checkpoint = ""}; }

  // All state by name and plane.
  using State = std::map<std::pair<std::string, int>, std::vector<float>>;
  static State Read(Job& job) {
    State state;
    const auto& parameters = job.spec().layout.parameters;
    for (int p = 0; p < std::ssize(parameters); ++p) {
      const Snapshot snapshot = job.TakeSnapshot(std::vector<int>{p}).value();
      for (int plane = 0; plane < kMaxPlanes; ++plane) {
        if (!snapshot.has_plane(p, static_cast<Plane>(plane))) continue;
        std::vector<float>& values = state[{parameters[p].name, plane}];
        values.resize(job.layout().place(p).elements);
        snapshot.Read(p, static_cast<Plane>(plane), 0, absl::MakeSpan(values));
      }
    }
    return state;
  }
  // A job with this state, made from nothing: first weights with their moments.
  JobDriver Fresh(JobSpec spec, const State& state, const FirstState& first) {
    JobDriver driver(engine_, std::move(spec));
    driver.AttachAll();
    for (int rank = 0; rank < driver.layout().world_size(); ++rank) {
      const auto uploader = driver.job()
                                .BeginFirstWeights({.rank = rank,
                                                    .process_id = "process" + std::to_string(rank),
                                                    .generation = driver.job().Status().generation},
                                                   first)
                                .value();
      for (const int chunk : driver.layout().chunks_of_rank(rank)) {
        const Chunk& of = driver.layout().chunks()[chunk];
        const auto planes = static_cast<int>(PlanesByGroup(driver.job().spec())[of.group].size());
        std::vector<float> values(planes * of.elements);
        for (int plane = 0; plane < planes; ++plane) {
          for (const ChunkPiece& piece : driver.layout().Pieces(chunk)) {
            const std::string& name = driver.job().spec().layout.parameters[piece.parameter].name;
            std::copy_n(state.at({name, plane}).begin() + piece.parameter_offset, piece.elements,
                        values.begin() + plane * of.elements + piece.chunk_offset);
          }
        }
        EXPECT_TRUE(driver.Write(chunk, values, uploader).ok());
      }
    }
    return driver;
  }
  absl::StatusOr<std::shared_ptr<Job>> Find(const std::string& uid = "") {
    return engine_.FindJob("job", uid);
  }
};

TEST_F(JobDeriveTest, KeepsWhatHasTheSameNameAndShape) {
  JobDriver before = Make(Before());
  const std::string old_uid = before.job().uid();
  for (const uint64_t seed : {1, 2}) before.Step(seed);
  before.Step(3, 1, {.trainer_state = "place"});
  const State state = Read(before.job());

  JobDriver after(engine_.CreateJob(After(), From(before.job())).value());
  // Until its weights are there the job is the old one.
  EXPECT_EQ(Find().value()->uid(), old_uid);
  EXPECT_EQ(Find(after.job().uid()).value().get(), &after.job());
  EXPECT_EQ(engine_.FindDerived("job", old_uid).value().get(), &after.job());
  EXPECT_EQ(engine_.ListJobs().size(), 1u);
  EXPECT_EQ(after.job().Status().phase, JobPhase::kAwaitingWeights);
  EXPECT_EQ(after.job().Status().inherited, (std::vector<bool>{true, false, true, false}));
  EXPECT_EQ(after.job().Position().committed_step, 3u);
  EXPECT_EQ(Read(before.job()), state);

  after.AttachAll();
  after.UploadWeights(kFirstSeed);
  EXPECT_EQ(Find().value().get(), &after.job());
  EXPECT_EQ(before.job().Status().phase, JobPhase::kClosed);
  EXPECT_EQ(before.listener(0).detached().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(Refused(Find(old_uid), absl::StatusCode::kNotFound, reason::kOtherJob));

  const State now = Read(after.job());
  for (const auto& [plane, values] : now) {
    const auto& [name, number] = plane;
    if (name == "p3" || name == "p0") {
      EXPECT_EQ(values, state.at(plane)) << name << " " << number;
    } else if (number > 0) {
      EXPECT_EQ(values, std::vector<float>(values.size(), 0.0f)) << name << " " << number;
    }
  }
  EXPECT_EQ(now.at({"new", 0}).front(), TestValue(kFirstSeed, 1, 0));
  EXPECT_EQ(now.at({"p2", 0}).back(), TestValue(kFirstSeed, 1, 300 + 700 + 900 - 1));
  const JobStatus status = after.job().Status();
  EXPECT_EQ(status.committed_step, 3u);
  EXPECT_EQ(status.applied_steps, 3u);
  EXPECT_EQ(status.update_counts, (std::vector<int64_t>{3, 0, 3, 0}));
  EXPECT_EQ(status.trainer_state, "place");
  EXPECT_EQ(status.resumed_uid, "");
  EXPECT_EQ(status.ancestors, std::vector<std::string>{old_uid});
  EXPECT_TRUE(status.inherited.empty());
  EXPECT_FALSE(after.job().UndoStep().ok());

  // The history goes on, with the norms of a group under its name.
  after.Step(4);
  const HistoryView history = after.job().History({});
  ASSERT_EQ(history.entries.size(), 4u);
  EXPECT_EQ(after.job().Status().recent_steps.size(), 4u);
  const auto column = std::find_if(history.columns.begin(), history.columns.end(),
                                   [](const HistoryColumn& c) { return c.name == "group0"; });
  ASSERT_NE(column, history.columns.end());
  const HistoryView old_history = before.job().History({});
  const auto old_column = std::find_if(old_history.columns.begin(), old_history.columns.end(),
                                       [](const HistoryColumn& c) { return c.name == "group0"; });
  EXPECT_NE(column - history.columns.begin(), old_column - old_history.columns.begin());
  EXPECT_EQ(history.entries[0].cell(column - history.columns.begin()).max,
            old_history.entries[0].cell(old_column - old_history.columns.begin()).max);
}

// What the old job has got since is not to be lost.
TEST_F(JobDeriveTest, IsGivenUpWhereTheOldJobGoesOn) {
  for (const std::string how : {"step", "process", "write", "group"}) {
    JobDriver before = Make(Before());
    before.Step(1);
    JobDriver after(engine_.CreateJob(After(), From(before.job())).value());
    after.AttachAll();
    if (how == "step") before.Step(2);
    if (how == "process") before.Attach(0, "another");
    if (how == "write") before.WriteState(before.NextWrite({Plane::kExpAvg}, {0}), 70);
    if (how == "group") ASSERT_TRUE(before.job().UpdateGroup(0, {.lr = 0.5}).ok());
    const std::string hash = before.job().StateHash();
    EXPECT_EQ(after.job().Status().phase, JobPhase::kClosed) << how;  // At once.
    EXPECT_EQ(Find().value().get(), &before.job()) << how;
    EXPECT_EQ(before.job().StateHash(), hash) << how;
    EXPECT_TRUE(Refused(Find(after.job().uid()), absl::StatusCode::kNotFound, reason::kOtherJob));
    // And that works.
    JobDriver again(engine_.CreateJob(After(), From(before.job())).value());
    again.AttachAll();
    again.UploadWeights(kFirstSeed);
    EXPECT_EQ(Find().value().get(), &again.job()) << how;
    ASSERT_TRUE(engine_.CloseJob("job").ok());
  }
}

TEST_F(JobDeriveTest, RefusesWhatCannotBe) {
  JobDriver awaiting(engine_, Before());
  EXPECT_TRUE(Refused(engine_.CreateJob(After(), From(awaiting.job())),
                      absl::StatusCode::kFailedPrecondition, reason::kNoWeightsYet));
  ASSERT_TRUE(engine_.CloseJob("job").ok());
  EXPECT_TRUE(Refused(engine_.CreateJob(After(), From(awaiting.job())), absl::StatusCode::kNotFound,
                      reason::kNoSuchJob));
  JobDriver before = Make(Before());
  EXPECT_TRUE(Refused(engine_.CreateJob(After(), From(awaiting.job())), absl::StatusCode::kNotFound,
                      reason::kOtherJob));
  JobSpec other_planes = After();
  other_planes.groups[0].hyper_parameters.amsgrad = false;
  EXPECT_TRUE(Refused(engine_.CreateJob(other_planes, From(before.job())),
                      absl::StatusCode::kFailedPrecondition));
  JobSpec strange = After();
  for (ParameterSpec& parameter : strange.layout.parameters) parameter.name += ".other";
  EXPECT_EQ(engine_.CreateJob(strange, From(before.job())).status().code(),
            absl::StatusCode::kFailedPrecondition);
  JobSpec large = After();
  large.layout = MakeJobSpec({.group_sizes = {{600}, {300, 700, 64 << 20}}}).layout;
  EXPECT_EQ(engine_.CreateJob(large, From(before.job())).status().code(),
            absl::StatusCode::kResourceExhausted);
  before.Begin(0);
  EXPECT_TRUE(Refused(engine_.CreateJob(After(), From(before.job())),
                      absl::StatusCode::kFailedPrecondition, reason::kOtherSettings));
  // What is taken back is nothing, and what is left is nobody's.
  ASSERT_TRUE(before.Discard(0));
  EXPECT_TRUE(engine_.CreateJob(After(), From(before.job())).ok());
  before.Begin(1);
  EXPECT_TRUE(Refused(engine_.CreateJob(other_planes, From(before.job())),
                      absl::StatusCode::kFailedPrecondition, reason::kOtherSettings));
  before.DetachAll();
  EXPECT_TRUE(engine_.CreateJob(After(), From(before.job())).ok());
  // None of these has changed anything, or left anything.
  EXPECT_EQ(Find().value().get(), &before.job());
  const int64_t used = engine_.memory().used_bytes();
  {
    JobSpec other = After();
    other.layout.parameters[1].name = "two";
    before.AttachAll();
    JobDriver after(engine_.CreateJob(other, From(before.job())).value());
    // A step of the old job that has begun when the last weights come.
    after.AttachAll();
    before.Begin(0);
    after.UploadWeights(kFirstSeed);
  }
  EXPECT_EQ(Find().value().get(), &before.job());
  EXPECT_LE(engine_.memory().used_bytes(), used);
}

TEST_F(JobDeriveTest, AskedForAgainIsTheSameOrAnother) {
  JobDriver before = Make(Before());
  before.Step(1);
  const Derivation from = From(before.job());
  std::shared_ptr<Job> first = engine_.CreateJob(After(), from).value();
  EXPECT_EQ(engine_.CreateJob(After(), from).status().code(), absl::StatusCode::kAlreadyExists);
  // The trainer wants other parameters by now.
  JobSpec spec = After();
  spec.layout.parameters[1].name = "two";
  const int64_t with_one = engine_.memory().used_bytes();
  JobDriver second(engine_.CreateJob(spec, from).value());
  EXPECT_EQ(first->Status().phase, JobPhase::kClosed);
  first.reset();
  EXPECT_LE(engine_.memory().used_bytes(), with_one);
  EXPECT_EQ(engine_.FindDerived("job", from.uid).value().get(), &second.job());
  second.AttachAll();
  second.UploadWeights(kFirstSeed);
  EXPECT_EQ(Find().value().get(), &second.job());
  // Its answer was lost: the job is there.
  EXPECT_EQ(engine_.CreateJob(spec, from).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(engine_.FindDerived("job", from.uid).value().get(), &second.job());
}

// A group's name may be another one's by now: its planes are those of its description.
TEST_F(JobDeriveTest, HasTheHyperParametersOfItsDescription) {
  JobDriver before = Make(Before());
  before.Step(1);
  JobSpec spec = After();
  spec.groups[0].name = "group0";
  spec.groups[1].name = "group1";
  spec.groups[1].hyper_parameters.lr = 0.25;
  JobDriver after(engine_.CreateJob(spec, From(before.job())).value());
  after.AttachAll();
  after.UploadWeights(kFirstSeed);
  const JobStatus status = after.job().Status();
  EXPECT_TRUE(status.hyper_parameters[0].amsgrad);
  EXPECT_FALSE(status.hyper_parameters[1].amsgrad);
  EXPECT_EQ(status.hyper_parameters[1].lr, 0.25);
  after.Step(2);
  JobDriver last(engine_.CreateJob(Before(), From(after.job())).value());
  EXPECT_EQ(last.job().Status().ancestors,
            (std::vector<std::string>{after.job().uid(), before.job().uid()}));
}

TEST_F(JobDeriveTest, GoesWithTheOldJobWhenThatIsClosed) {
  JobDriver before = Make(Before());
  before.Step(1);
  JobDriver after(engine_.CreateJob(After(), From(before.job())).value());
  after.AttachAll();
  ASSERT_TRUE(engine_.CloseJob("job").ok());
  EXPECT_EQ(after.job().Status().phase, JobPhase::kClosed);
  EXPECT_TRUE(Refused(Find(), absl::StatusCode::kNotFound, reason::kNoSuchJob));
  EXPECT_TRUE(Refused(Find(after.job().uid()), absl::StatusCode::kNotFound, reason::kNoSuchJob));
}

// A rank's weights of two sessions do not mix, and what is inherited does not come again.
TEST_F(JobDeriveTest, ARankThatIsTakenAnewBringsItsWeightsAgain) {
  JobDriver before = Make(Before());
  before.Step(1);
  const State state = Read(before.job());
  JobDriver after(engine_.CreateJob(After(), From(before.job())).value());
  after.AttachAll();
  const auto of = [&](int p) { return after.layout().ChunksOfParameter(p).front(); };
  ASSERT_TRUE(after.Write(of(1), after.Values(of(1), 5), std::nullopt).ok());
  after.Attach(0, "another");
  after.UploadWeights(kFirstSeed);
  EXPECT_EQ(Find().value().get(), &after.job());
  const State now = Read(after.job());
  EXPECT_EQ(now.at({"new", 0}).front(), TestValue(kFirstSeed, 1, 0));
  EXPECT_EQ(now.at({"p0", 1}), state.at({"p0", 1}));
}

TEST_F(JobDeriveTest, GoesOnFromACheckpoint) {
  const std::string directory = testing::TempDir() + "/job_derive_test_" + std::to_string(getpid());
  JobDriver before = Make(Before());
  before.Step(1);
  const State state = Read(before.job());
  const std::string saved = before.job().Save(directory).value().directory;
  before.Step(2);
  const Derivation from = {.uid = "", .checkpoint = saved};
  // There is a job of that name.
  EXPECT_EQ(engine_.CreateJob(After(), from).status().code(),
            absl::StatusCode::kFailedPrecondition);
  for (const bool in_place_of_a_job : {true, false}) {
    if (!in_place_of_a_job) ASSERT_TRUE(engine_.CloseJob("job").ok());
    Derivation derivation = from;
    if (in_place_of_a_job) derivation.uid = before.job().uid();
    JobDriver after(engine_.CreateJob(After(), derivation).value());
    EXPECT_EQ(engine_.ListJobs().size(), 1u);
    after.AttachAll();
    after.UploadWeights(kFirstSeed);
    EXPECT_EQ(Find().value().get(), &after.job());
    EXPECT_EQ(after.job().Status().committed_step, 1u);
    EXPECT_EQ(after.job().Status().update_counts, (std::vector<int64_t>{1, 0, 1, 0}));
    const State now = Read(after.job());
    EXPECT_EQ(now.at({"p3", 2}), state.at({"p3", 2}));
    EXPECT_EQ(now.at({"new", 0}).front(), TestValue(kFirstSeed, 1, 0));
    after.Step(3);
  }
  ASSERT_TRUE(engine_.CloseJob("job").ok());
  EXPECT_EQ(
      engine_.CreateJob(After(), {.uid = "", .checkpoint = directory + "/none"}).status().code(),
      absl::StatusCode::kNotFound);
  EXPECT_TRUE(engine_.ListJobs().empty());
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace ballast
