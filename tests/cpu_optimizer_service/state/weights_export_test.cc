#include "cpu_optimizer_service/state/weights_export.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/state/safetensors.h"
#include "tests/cpu_optimizer_service/state/checkpoint_for_tests.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;

class WeightsExportTest : public CheckpointTest {
 protected:
  WeightsExportTest() : driver_(engine_, Spec(2)) {
    driver_.UploadWeights();
    driver_.AttachAll();
    driver_.Step(1);
    SaveAt(driver_, "saved");
  }
  absl::StatusOr<ExportedWeights> Export(ExportRequest request, FileSystem* files = nullptr) {
    request.checkpoint = Path(request.checkpoint.empty() ? "saved" : request.checkpoint);
    request.directory = Path("out");
    return ExportWeights(files == nullptr ? PosixFileSystem() : *files, request);
  }
  static std::vector<float> Weights(JobDriver& driver, int parameter) {
    const Snapshot snapshot = driver.job().TakeSnapshot({parameter}).value();
    std::vector<float> values(driver.job().layout().place(parameter).elements);
    snapshot.Read(parameter, Plane::kMaster, 0, absl::MakeSpan(values));
    return values;
  }
  std::set<std::string> NamesBeside() const { return Names(""); }

  JobDriver driver_;
};

TEST_F(WeightsExportTest, OneFileHasTheWeightsOfTheStepInTheDTypeAskedFor) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    fs::remove_all(Path("out"));
    const absl::StatusOr<ExportedWeights> exported = Export({.dtype = dtype});
    ASSERT_TRUE(exported.ok()) << exported.status();
    EXPECT_THAT(exported->files, ElementsAre("model.safetensors"));
    EXPECT_THAT(Names("out"), ElementsAre("model.safetensors"));
    EXPECT_EQ(exported->step, 1u);
    EXPECT_EQ(exported->tensors,
              static_cast<int64_t>(driver_.job().spec().layout.parameters.size()));
    const SafetensorsFile file =
        SafetensorsFile::Open(PosixFileSystem(), Path("out/model.safetensors"), 1 << 20,
                              SafetensorsFile::Take::kWeights)
            .value();
    for (size_t p = 0; p < driver_.job().spec().layout.parameters.size(); ++p) {
      const ParameterSpec& parameter = driver_.job().spec().layout.parameters[p];
      std::vector<float> expected = Weights(driver_, static_cast<int>(p));
      for (float& value : expected) {
        if (dtype == DType::kBFloat16) value = BFloat16ToFloat(FloatToBFloat16(value));
      }
      ASSERT_NE(file.Find(parameter.name), nullptr) << parameter.name;
      EXPECT_EQ(file.Find(parameter.name)->shape, parameter.shape);
      std::vector<float> came(expected.size());
      ASSERT_TRUE(file.Read(parameter.name, 0, absl::MakeSpan(came)).ok());
      EXPECT_EQ(came, expected) << parameter.name;
    }
  }
}

TEST_F(WeightsExportTest, SeveralFilesWithTheirIndexAreWhatAnImportTakes) {
  const absl::StatusOr<ExportedWeights> exported =
      Export({.dtype = DType::kFloat32, .most_file_bytes = 5000});
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_THAT(exported->files,
              ElementsAre("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"));
  const nlohmann::json index = ReadJson(Path("out/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], exported->bytes);
  EXPECT_EQ(index["weight_map"].size(), driver_.job().spec().layout.parameters.size());
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 2});
  JobDriver imported(engine, Spec(1));
  ASSERT_TRUE(imported.job().Load(Path("out"), /*weights_only=*/true).ok());
  for (int p = 0; p < static_cast<int>(index["weight_map"].size()); ++p) {
    EXPECT_EQ(Weights(imported, p), Weights(driver_, p));
  }
}

TEST_F(WeightsExportTest, AnImportLeavesOtherPlanesAsTheyBegin) {
  ASSERT_TRUE(Export({.dtype = DType::kFloat32}).ok());
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 2});
  JobSpec spec = Spec(1);
  spec.groups[1].hyper_parameters = DefaultsOf(Rule::kAdagrad);
  spec.groups[1].hyper_parameters.initial_accumulator_value = 0.25;
  JobDriver imported(engine, spec);
  const auto sums = [&] {
    std::vector<float> values(imported.job().layout().place(3).elements);
    imported.job().TakeSnapshot({3}).value().Read(3, Plane::kSum, 0, absl::MakeSpan(values));
    return values;
  };
  imported.UploadWeights();
  EXPECT_THAT(sums(), testing::Each(0.25f));
  imported.AttachAll();
  imported.Step(1);
  EXPECT_THAT(sums(), testing::Contains(testing::Ne(0.25f)));
  ASSERT_TRUE(imported.job().Load(Path("out"), /*weights_only=*/true).ok());
  EXPECT_EQ(Weights(imported, 3), Weights(driver_, 3));
  EXPECT_THAT(sums(), testing::Each(0.25f));
}

TEST_F(WeightsExportTest, NothingIsOverwrittenAndAnEmptyDirectoryIsFilled) {
  fs::create_directories(Path("out"));
  ASSERT_TRUE(Export({}).ok());
  const auto size = fs::file_size(Path("out/model.safetensors"));
  driver_.Step(2);
  SaveAt(driver_, "later");
  EXPECT_TRUE(Refused(Export({.checkpoint = "later"}), absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(fs::file_size(Path("out/model.safetensors")), size);
  fs::remove_all(Path("out"));
  std::ofstream(Path("out")) << "a file";
  EXPECT_EQ(Export({}).status().code(), absl::StatusCode::kFailedPrecondition);
  fs::remove(Path("out"));
  fs::create_directory_symlink(Path("nowhere"), Path("out"));
  EXPECT_EQ(Export({}).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(WeightsExportTest, ADirectoryThatNoRenameReplacesIsRefusedBeforeAnythingIsRead) {
  fs::create_directories(Path("out/in"));
  for (const char* name : {".", "..", "out/.", "out/in/../"}) {
    EXPECT_TRUE(Refused(
        ExportWeights(PosixFileSystem(),
                      {.checkpoint = "none", .directory = *name == '.' ? name : Path(name)}),
        absl::StatusCode::kFailedPrecondition));
  }
}

TEST_F(WeightsExportTest, AFullDiskAtAnyByteLeavesNothing) {
  const std::set<std::string> before = NamesBeside();
  bool done = false;
  for (int64_t room = 0; !done; room += 1500) {
    FillingFileSystem files;
    files.bytes_left = room;
    const absl::Status status = Export({.most_file_bytes = 5000}, &files).status();
    done = status.ok();
    if (done) break;
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(NamesBeside(), before) << room;
    ASSERT_LT(room, 1 << 20);
  }
}

TEST_F(WeightsExportTest, ADamagedCheckpointIsNotExported) {
  std::fstream file(Path("saved/master.safetensors"),
                    std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-100, std::ios::end);
  file.put(1).flush();
  const std::set<std::string> before = NamesBeside();
  const absl::Status status = Export({}).status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kDataLoss));
  EXPECT_EQ(NamesBeside(), before);
  EXPECT_EQ(Export({.checkpoint = "none"}).status().code(), absl::StatusCode::kNotFound);
}

// The largest numbers of fp32 are rounded to infinity in bf16.
TEST(WriteSafetensors, SaysWhichWeightADTypeDoesNotHave) {
  const std::string path = testing::TempDir() + "/large.safetensors";
  const std::vector<TensorEntry> tensors = {{.name = "w", .shape = {3}, .elements = 3}};
  const auto read = [](int, int64_t, absl::Span<float> out) {
    out[0] = out[2] = 1;
    out[1] = std::numeric_limits<float>::max();
  };
  EXPECT_TRUE(
      Refused(WriteSafetensors(PosixFileSystem(), path, tensors, read, {.dtype = DType::kBFloat16}),
              absl::StatusCode::kFailedPrecondition));
  std::filesystem::remove(path);
  EXPECT_TRUE(WriteSafetensors(PosixFileSystem(), path, tensors, read).ok());
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace ballast
