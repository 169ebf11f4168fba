// Checkpoints of a job over several members: one index, files of all, and the state of one host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"
#include "tests/cpu_optimizer_service/job/members/cluster.h"
#include "tests/cpu_optimizer_service/job/slow_disk.h"
#include "tests/support/eventually.h"
#include "tests/support/sanitizers.h"

namespace ballast::member_saves_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int kRanks = 4;
constexpr char kSaved[] = "/saved";

JobSpec Buckets() {
  JobSpec spec = MakeJobSpec({.group_sizes = {{1000, 24, 3000}, {700, 1, 2000}},
                              .world_size = kRanks,
                              .bucket_elements = 2048,
                              .chunk_elements = 512});
  spec.groups[1].hyper_parameters.amsgrad = true;
  return spec;
}

// Rows, or columns, which are in as many pieces as there are rows.
JobSpec Mesh(int dim) {
  JobSpec spec = Buckets();
  spec.layout.partitions.clear();
  spec.layout.mesh = {{"shards", kRanks}};
  for (ParameterSpec& parameter : spec.layout.parameters) {
    if (parameter.shape[0] % 100 == 0) parameter.shape = {parameter.shape[0] / 20, 20};
    parameter.placements = {{parameter.shape.size() == 2 ? dim : 0}};
  }
  return spec;
}

// A disk that all members share, unless they have other directories.
class Disk {
 public:
  explicit Disk(std::vector<std::string> directories = {}) : directories_(std::move(directories)) {}

  Cluster::Equip equip() {
    return [this](int member, EngineOptions& options) {
      options.file_system = &disk;
      const std::string directory =
          member < static_cast<int>(directories_.size()) ? directories_[member] : kSaved;
      if (directory.empty()) return;
      opened_.push_back(CheckpointDirectory::Open(disk, directory).value());
      options.checkpoints = opened_.back().get();
    };
  }
  EngineOptions options() {
    EngineOptions options = {.memory_limit_bytes = int64_t{256} << 20, .threads = 2};
    equip()(0, options);
    return options;
  }

  SlowDisk disk;

 private:
  const std::vector<std::string> directories_;
  std::vector<std::unique_ptr<CheckpointDirectory>> opened_;
};

// A member's way to the disk, on which one read fails.
class FailingReads final : public FileSystem {
 public:
  explicit FailingReads(FileSystem& disk) : disk_(disk) {}
  // That one of all from now on; 0: none.
  void FailAt(int read) { left_ = read; }

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    return disk_.Create(path);
  }
  absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override {
    auto file = disk_.Open(path);
    if (!file.ok()) return file.status();
    return std::make_unique<File>(*std::move(file), left_);
  }
  bool Exists(const std::string& path) override { return disk_.Exists(path); }
  absl::Status CreateDirectory(const std::string& path) override {
    return disk_.CreateDirectory(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return disk_.Rename(from, to);
  }
  absl::Status RemoveAll(const std::string& path) override { return disk_.RemoveAll(path); }
  absl::StatusOr<std::vector<std::string>> List(const std::string& directory) override {
    return disk_.List(directory);
  }
  std::shared_ptr<const void> TryLock(const std::string& directory) override {
    return disk_.TryLock(directory);
  }

 private:
  class File final : public ReadableFile {
   public:
    File(std::unique_ptr<ReadableFile> file, std::atomic<int>& left)
        : file_(std::move(file)), left_(left) {}
    int64_t size_bytes() const override { return file_->size_bytes(); }
    absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override {
      if (left_ > 0 && --left_ == 0) return absl::InternalError("the disk does not read");
      return file_->Read(offset, out);
    }

   private:
    const std::unique_ptr<ReadableFile> file_;
    std::atomic<int>& left_;
  };

  FileSystem& disk_;
  std::atomic<int> left_ = 0;
};

std::unique_ptr<Cluster> Begun(Disk& disk, const JobSpec& spec, const std::vector<int>& homes,
                               uint32_t seed = 1) {
  return Cluster::Begun(spec, homes, seed, nullptr, -1, disk.equip());
}

std::string Folder(const JobSpec& spec) { return std::string(kSaved) + "/" + spec.name; }

void AttachAgain(Cluster& cluster) {
  cluster.AwaitWords();
  cluster.ForAll([](JobDriver& each) { each.AttachAll(); });
}

// Of members 1 and 2, at any instants.
void CutLinks(Cluster& cluster, std::mt19937& random) {
  for (int cut = 0; cut < 3; ++cut) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 1500));
    cluster.Cut(1 + static_cast<int>(random() % 2));
  }
}

const std::vector<std::vector<int>>& Homes() {
  static const auto& homes = *new std::vector<std::vector<int>>{
      {0, 0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1}, {1, 0, 0, 2}, {0, 1, 2, 3}};
  return homes;
}

// What is saved over these members loads onto one host, and onto others; what one host has saved
// onto these.
TEST(MemberSaves, LoadOntoAnyMembers) {
  for (const JobSpec& spec : {Buckets(), Mesh(0), Mesh(1)}) {
    Disk disk;
    Engine engine(disk.options());
    JobDriver one(engine, spec);
    one.UploadWeights();
    one.AttachAll();
    for (uint64_t step = 1; step <= 3; ++step) one.Step(10 * step, 1);
    ASSERT_EQ(one.job().Save(Folder(spec)).status(), absl::OkStatus());
    one.Step(40, 1);
    std::string saved = Folder(spec);
    for (const std::vector<int>& homes : Homes()) {
      SCOPED_TRACE(testing::PrintToString(homes));
      // Into one without weights, or with others.
      auto cluster =
          std::make_unique<Cluster>(spec, homes, 1, nullptr, -1, int64_t{256} << 20, disk.equip());
      ASSERT_EQ(cluster->Create(), absl::OkStatus());
      if (homes[0] == 1) {
        cluster->ForAll([](JobDriver& each) { each.UploadWeights(5); });
        AttachAgain(*cluster);
        cluster->Step(1, 70);
      }
      Job& lead = cluster->job(cluster->lead());
      const auto loaded = lead.Load(saved);
      ASSERT_EQ(loaded.status(), absl::OkStatus());
      EXPECT_EQ(loaded->step, 3U);
      AttachAgain(*cluster);
      cluster->Step(4, 40);
      cluster->ExpectStateOf(one.job());
      // Back to what these members save.
      ASSERT_EQ(lead.Load(saved).status(), absl::OkStatus());
      AttachAgain(*cluster);
      const auto again = lead.Save(Folder(spec));
      ASSERT_EQ(again.status(), absl::OkStatus());
      saved = again->directory;
      cluster = nullptr;
      Engine other(disk.options());
      JobDriver whole(other, spec);
      ASSERT_EQ(whole.job().Load(saved).status(), absl::OkStatus());
      whole.AttachAll();
      whole.Step(40, 1);
      EXPECT_EQ(whole.job().StateHash(), one.job().StateHash());
    }
  }
}

// The pins are of the committed step, whatever ranks have given of the next one; that goes on while
// files are written.
TEST(MemberSaves, AreOfOneStepWhileOthersFollow) {
  const JobSpec spec = Buckets();
  for (int when = 0; when < 3; ++when) {
    Disk disk;
    const auto begun = Begun(disk, spec, {0, 1, 0, 1});
    Cluster& cluster = *begun;
    cluster.Step(1, 10);
    Engine engine(disk.options());
    JobDriver expected(engine, spec);
    expected.UploadWeights();
    expected.AttachAll();
    expected.Step(10, 1);
    if (when > 0) cluster.Give(20);
    if (when > 1) {
      for (const int rank : {1, 3}) {
        EXPECT_EQ(cluster.home(rank).SealWith(rank, 1, StepVote()), std::nullopt);
      }
      cluster.AwaitWords();
    }
    disk.disk.HoldUp();
    std::promise<absl::StatusOr<CheckpointInfo>> saved;
    (void)cluster.job(0).Save({.folder = Folder(spec)}, [&](absl::StatusOr<CheckpointInfo> info) {
      saved.set_value(std::move(info));
    });
    disk.disk.AwaitHeldUp();
    if (when == 0) cluster.Give(20);
    for (int rank = 0; rank < kRanks; ++rank) {
      if (when > 1 && rank % 2 == 1) continue;
      EXPECT_EQ(cluster.home(rank).SealWith(rank, 1, StepVote()), std::nullopt);
    }
    cluster.AwaitCommit(2);
    cluster.Step(3, 30);
    disk.disk.Release();
    const auto info = saved.get_future().get();
    ASSERT_EQ(info.status(), absl::OkStatus());
    EXPECT_EQ(info->step, 1U);
    ASSERT_EQ(cluster.job(0).Load(info->directory).status(), absl::OkStatus());
    cluster.AwaitWords();
    cluster.ExpectStateOf(expected.job());
  }
}

// Before a byte is written.
TEST(MemberSaves, AreRefusedWhereAMemberDoesNotSeeTheFolder) {
  const JobSpec spec = Buckets();
  for (const std::string& directory : {"", "/elsewhere"}) {
    Disk disk({kSaved, kSaved, directory});
    const auto cluster = Begun(disk, spec, {0, 1, 2, 0});
    cluster->Step(1, 10);
    const auto saved = cluster->job(0).Save(Folder(spec));
    EXPECT_EQ(saved.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(saved.status().message(), HasSubstr("member host2"));
    cluster->AwaitWords();
    EXPECT_THAT(disk.disk.TakeNices(), IsEmpty()) << "no file of a plane";
    EXPECT_THAT(disk.disk.List(Folder(spec)).value_or(std::vector<std::string>()), IsEmpty());
    cluster->Step(2, 20);
  }
}

TEST(MemberSaves, AreOfTheLeadAndOfItsNames) {
  const JobSpec spec = Buckets();
  Disk disk;
  const auto cluster = Begun(disk, spec, {1, 0, 0, 1});
  EXPECT_EQ(ReasonOf(cluster->job(0).Save(Folder(spec)).status()), reason::kOtherMemberLeads);
  EXPECT_EQ(ReasonOf(cluster->job(0).Load(Folder(spec)).status()), reason::kOtherMemberLeads);
  EXPECT_EQ(cluster->job(1).Save("/somewhere/gpt").status().code(),
            absl::StatusCode::kFailedPrecondition);
  // What a member asks for at its end.
  const auto saved = Await<CheckpointInfo>([&](Done<CheckpointInfo> done) {
    cluster->job(0).Save({.folder = Folder(spec), .asked_for = false}, std::move(done));
  });
  ASSERT_EQ(saved.status(), absl::OkStatus());
  const auto found = ListCheckpoints(disk.disk, Folder(spec)).value();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_FALSE(found[0].facts.asked_for);
  cluster->AwaitWords();
}

// What is damaged in a member's part is found before anything is replaced.
TEST(MemberSaves, AreCheckedByAllBeforeTheyAreLoaded) {
  const JobSpec spec = Buckets();
  Disk disk;
  const auto cluster = Begun(disk, spec, {0, 0, 1, 1});
  cluster->Step(1, 10);
  const auto saved = cluster->job(0).Save(Folder(spec));
  ASSERT_EQ(saved.status(), absl::OkStatus());
  cluster->Step(2, 20);
  const std::string path = saved->directory + "/exp_avg-member-1.safetensors";
  const int64_t size = disk.disk.Open(path).value()->size_bytes();
  const auto file = disk.disk.Create(path).value();
  const std::vector<std::byte> zeros(size);
  ASSERT_EQ(file->Append(zeros), absl::OkStatus());
  ASSERT_EQ(file->Close(), absl::OkStatus());
  const auto loaded = cluster->job(0).Load(saved->directory);
  EXPECT_EQ(loaded.status().code(), absl::StatusCode::kDataLoss);
  const Generation generation = cluster->job(0).Status().generation;
  cluster->Step(3, 30);
  EXPECT_EQ(cluster->job(0).Status().generation, generation);
}

// A link that is cut at any instant ends a save, or not; the next one is whole, and steps go on.
TEST(MemberSaves, OutliveLinksThatAreCut) {
  const JobSpec spec = Buckets();
  std::mt19937 random(3);
  int whole = 0;
  Engine alone({.memory_limit_bytes = int64_t{256} << 20, .threads = 2});
  JobDriver after_one(alone, spec);
  after_one.UploadWeights();
  after_one.AttachAll();
  after_one.Step(10, 1);
  const std::string expected = after_one.job().StateHash();
  for (int turn = 0; turn < Repeats(40); ++turn) {
    SCOPED_TRACE(turn);
    Disk disk;
    const auto cluster = Begun(disk, spec, {0, 1, 2, 0}, turn);
    cluster->Step(1, 10);
    std::promise<absl::StatusOr<CheckpointInfo>> saved;
    (void)cluster->job(0).Save({.folder = Folder(spec)}, [&](absl::StatusOr<CheckpointInfo> info) {
      saved.set_value(std::move(info));
    });
    CutLinks(*cluster, random);
    cluster->Step(2, 20);
    const auto first = saved.get_future().get();
    if (first.ok()) {
      ++whole;
      Engine engine(disk.options());
      JobDriver one(engine, spec);
      ASSERT_EQ(one.job().Load(first->directory).status(), absl::OkStatus());
      EXPECT_EQ(one.job().StateHash(), expected);
    }
    // The step was over before a member heard of the save.
    EXPECT_TRUE(first.ok() || absl::IsAborted(first.status())) << first.status();
    cluster->AwaitWords();
    const auto second = cluster->job(0).Save(Folder(spec));
    ASSERT_EQ(second.status(), absl::OkStatus());
    EXPECT_EQ(second->step, 2U);
    cluster->AwaitWords();
    for (int m = 0; m < cluster->members(); ++m) {
      // A thread that wrote for a save that has failed comes to its end.
      EXPECT_TRUE(Eventually([&] { return cluster->job(m).Status().saves.empty(); })) << m;
    }
    ASSERT_EQ(cluster->job(0).Load(second->directory).status(), absl::OkStatus());
    AttachAgain(*cluster);
    cluster->Step(3, 30);
  }
  if (!kSanitized) EXPECT_GT(whole, 0);
}

// It goes on where it was cut off, on the link that comes next.
TEST(MemberSaves, AreLoadedOverLinksThatAreCut) {
  const JobSpec spec = Buckets();
  std::mt19937 random(4);
  Disk disk;
  Engine engine(disk.options());
  JobDriver one(engine, spec);
  one.UploadWeights();
  one.AttachAll();
  one.Step(10, 1);
  const std::string saved = one.job().Save(Folder(spec)).value().directory;
  for (int turn = 0; turn < Repeats(40); ++turn) {
    SCOPED_TRACE(turn);
    const auto cluster = Begun(disk, spec, {0, 1, 2, 0}, turn);
    cluster->Step(1, 90);
    std::promise<absl::StatusOr<CheckpointInfo>> loaded;
    (void)cluster->job(0).Load({.path = saved}, [&](absl::StatusOr<CheckpointInfo> info) {
      loaded.set_value(std::move(info));
    });
    CutLinks(*cluster, random);
    ASSERT_EQ(loaded.get_future().get().status(), absl::OkStatus());
    cluster->AwaitWords();
    cluster->ExpectStateOf(one.job());
    AttachAgain(*cluster);
    cluster->Step(2, 20);
  }
}

// Whichever process dies at whichever store: the job is loaded, once it is asked for again where
// nobody had begun to.
TEST(MemberSaves, AreLoadedWhoeverDies) {
  if (!histories::CanDie()) GTEST_SKIP() << "threads cannot be stopped here";
  const JobSpec spec = Buckets();
  Disk disk;
  Engine engine(disk.options());
  JobDriver one(engine, spec);
  one.UploadWeights();
  one.AttachAll();
  one.Step(10, 1);
  const std::string saved = one.job().Save(Folder(spec)).value().directory;
  std::mt19937 random(5);
  int deaths_seen = 0;
  for (int turn = 0; turn < Repeats(60); ++turn) {
    const int victim = turn % 3;
    SCOPED_TRACE(turn);
    histories::Deaths deaths;
    const auto cluster = Cluster::Begun(spec, {0, 1, 2, 0}, turn, &deaths, victim, disk.equip());
    cluster->Step(1, 90);
    cluster->Step(2, 91);
    deaths.Arm(1 + static_cast<int>(random() % 30), static_cast<int>(random() % 10));
    const auto is_loaded = [&] {
      for (int m = 0; m < cluster->members(); ++m) {
        const JobStatus status = cluster->job(m).Status();
        if (status.phase != JobPhase::kReady || status.committed_step != 1) return false;
      }
      return true;
    };
    ASSERT_NO_FATAL_FAILURE(cluster->UntilOver(
        is_loaded,
        [&](Cluster::Answered answered) {
          // The generation rises with what a later process of the lead finds.
          if (cluster->job(0).Status().generation != Generation(1)) {
            return answered(absl::AbortedError("it is being loaded"));
          }
          // A member that dies while it looks ends the call.
          (void)cluster->job(0).Load(
              {.path = saved},
              [answered](const absl::StatusOr<CheckpointInfo>& info) { answered(info.status()); });
        },
        deaths_seen));
    cluster->ExpectStateOf(one.job());
    AttachAgain(*cluster);
    cluster->Step(2, 20);
  }
  if (!kSanitized) EXPECT_GE(deaths_seen, 20);
}

// It has pinned nothing, and its next update waits until its part is written.
TEST(MemberSaves, AreOfAMemberWithoutMemoryForSecondVersions) {
  const JobSpec spec = Buckets();
  const std::vector<int> homes = {0, 0, 1, 1};
  int64_t needed = 0;
  {
    Disk disk;
    const auto cluster = Begun(disk, spec, homes);
    needed = cluster->engine(1).memory().used_bytes();
  }
  for (const bool seals_first : {false, true}) {
    Disk disk;
    const auto equip = disk.equip();
    const auto cluster =
        Cluster::Begun(spec, homes, 1, nullptr, -1, [&](int member, EngineOptions& options) {
          equip(member, options);
          if (member == 1) options.memory_limit_bytes = needed + 1000;
        });
    cluster->Step(1, 10);
    disk.disk.HoldUp();
    std::promise<absl::StatusOr<CheckpointInfo>> saved;
    (void)cluster->job(0).Save({.folder = Folder(spec)}, [&](absl::StatusOr<CheckpointInfo> info) {
      saved.set_value(std::move(info));
    });
    cluster->Give(20);
    if (!seals_first) {
      disk.disk.AwaitHeldUp();
      EXPECT_TRUE(cluster->job(1).Status().saves.at(0).holds_back_decisions);
    }
    for (const int rank : {2, 3}) {
      EXPECT_EQ(cluster->home(rank).SealWith(rank, 1, StepVote()), std::nullopt);
    }
    cluster->AwaitWords();
    disk.disk.Release();
    for (const int rank : {0, 1}) {
      EXPECT_EQ(cluster->home(rank).SealWith(rank, 1, StepVote()), std::nullopt);
    }
    const auto info = saved.get_future().get();
    ASSERT_EQ(info.status(), absl::OkStatus());
    EXPECT_EQ(info->step, 1U);
    cluster->AwaitCommit(2);
  }
}

// A load that fails at any read: before anything is replaced, or half way. Then the job is torn at the
// lead, and the next load helps, whoever had loaded.
TEST(MemberSaves, AreLoadedAfterALoadThatFailed) {
  const JobSpec spec = Buckets();
  Disk disk;
  Engine engine(disk.options());
  JobDriver one(engine, spec);
  one.UploadWeights();
  one.AttachAll();
  for (uint64_t step = 1; step <= 2; ++step) one.Step(10 * step, 1);
  const std::string saved = one.job().Save(Folder(spec)).value().directory;
  int torn = 0;
  for (int read = 1, turn = 0;; read += 5, ++turn) {
    SCOPED_TRACE(read);
    FailingReads failing(disk.disk);
    const auto equip = disk.equip();
    const int sick = turn % 3;
    const auto cluster = Cluster::Begun(spec, {0, 1, 2, 0}, turn, nullptr, -1,
                                        [&](int member, EngineOptions& options) {
                                          equip(member, options);
                                          if (member == sick) options.file_system = &failing;
                                        });
    // It goes back, or on.
    for (int step = 1; step <= 1 + turn % 4; ++step) cluster->Step(step, 90 + step);
    failing.FailAt(read);
    const absl::Status failed = cluster->job(0).Load(saved).status();
    if (failed.ok()) break;
    cluster->AwaitWords();
    const bool is_torn = cluster->job(0).Status().phase == JobPhase::kBroken;
    if (is_torn) ++torn;
    EXPECT_EQ(cluster->job(0).Save(Folder(spec)).ok(), !is_torn);
    if (is_torn) {
      // No rank waits for what will not come.
      const int rank = cluster->member(1).layout().ranks()[0];
      const auto attached = cluster->job(1).Attach({.rank = rank, .process_id = "a"});
      EXPECT_EQ(attached.status().code(), absl::StatusCode::kFailedPrecondition);
    }
    if (turn % 2 == 0) cluster->Cut(1 + turn / 2 % 2);
    failing.FailAt(0);
    ASSERT_EQ(cluster->job(0).Load(saved).status(), absl::OkStatus());
    cluster->AwaitWords();
    cluster->ExpectStateOf(one.job());
    AttachAgain(*cluster);
    cluster->Step(3, 30);
  }
  EXPECT_GT(torn, 3);
}

// What others have pinned for a process that died is let go, and the next save is whole.
TEST(MemberSaves, EndWithTheProcessOfAMember) {
  if (!histories::CanDie()) GTEST_SKIP() << "threads cannot be stopped here";
  const JobSpec spec = Buckets();
  std::mt19937 random(6);
  int deaths_seen = 0;
  for (int turn = 0; turn < Repeats(60); ++turn) {
    const int victim = turn % 3;
    SCOPED_TRACE(turn);
    Disk disk;
    histories::Deaths deaths;
    const auto cluster = Cluster::Begun(spec, {0, 1, 2, 0}, turn, &deaths, victim, disk.equip());
    cluster->Step(1, 10);
    deaths.Arm(1 + static_cast<int>(random() % 20), 0);
    deaths.Expose();
    auto ended = std::make_shared<std::promise<absl::Status>>();
    (void)cluster->job(0).Save({.folder = Folder(spec)},
                               [ended](auto saved) { ended->set_value(saved.status()); });
    // A save stores nothing, but new generations do.
    const int rank = cluster->member(victim).layout().ranks()[0];
    const auto attached = std::make_shared<std::atomic<int>>(0);
    for (const std::string& process : {"a", "b", "c"}) {
      (void)cluster->job(victim).Attach(
          {.rank = rank, .process_id = process},
          [attached](const absl::StatusOr<Attachment>&) { ++*attached; });
    }
    while (*attached < 3 && !*deaths.flag()) std::this_thread::yield();
    cluster->AwaitWords();
    if (deaths.Hide()) {
      ++deaths_seen;
      cluster->TakeOver();
    }
    deaths.Disarm();
    if (victim != cluster->lead()) (void)ended->get_future().get();
    cluster->AwaitWords();
    cluster->member(victim).Attach(rank);  // In place of the last of those processes.
    AttachAgain(*cluster);
    const auto saved = cluster->job(0).Save(Folder(spec));
    ASSERT_EQ(saved.status(), absl::OkStatus());
    cluster->AwaitWords();
    for (int m = 0; m < cluster->members(); ++m) {
      // A thread that wrote for a save that has failed comes to its end.
      EXPECT_TRUE(Eventually([&] { return cluster->job(m).Status().saves.empty(); })) << m;
    }
    cluster->Step(2, 20);
  }
  if (!kSanitized) EXPECT_GE(deaths_seen, 15);
}

}  // namespace
}  // namespace ballast::member_saves_test
