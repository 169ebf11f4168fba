// Jobs whose checkpoints are on a real disk that may be full, in a directory of the test's own.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_FOR_TESTS_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_FOR_TESTS_H_

#include <gtest/gtest.h>
#include <libdeflate.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/sha256.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"

namespace ballast {

// Passes everything on to the real files until `bytes_left` have been written: then the disk is
// full.
class FillingFileSystem : public FileSystem {
 public:
  class File : public WritableFile {
   public:
    File(FillingFileSystem& owner, std::unique_ptr<WritableFile> file)
        : owner_(owner), file_(std::move(file)) {}
    absl::Status Append(absl::Span<const std::byte> bytes) override {
      const auto size = static_cast<int64_t>(bytes.size());  // Planes are written in parallel.
      if (owner_.bytes_left.fetch_sub(size) < size)
        return absl::ResourceExhaustedError("disk full");
      return file_->Append(bytes);
    }
    absl::Status Close() override { return file_->Close(); }

   private:
    FillingFileSystem& owner_;
    std::unique_ptr<WritableFile> file_;
  };
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    auto file = PosixFileSystem().Create(path);
    if (!file.ok()) return file.status();
    return std::make_unique<File>(*this, *std::move(file));
  }
  absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override {
    return PosixFileSystem().Open(path);
  }
  bool Exists(const std::string& path) override { return PosixFileSystem().Exists(path); }
  absl::Status CreateDirectory(const std::string& path) override {
    return PosixFileSystem().CreateDirectory(path);
  }
  bool IsSymbolicLink(const std::string& path) override {
    return PosixFileSystem().IsSymbolicLink(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return PosixFileSystem().Rename(from, to);
  }
  absl::Status RemoveAll(const std::string& path) override {
    return PosixFileSystem().RemoveAll(path);
  }
  absl::StatusOr<std::vector<std::string>> List(const std::string& directory) override {
    return PosixFileSystem().List(directory);
  }
  std::shared_ptr<const void> TryLock(const std::string& directory) override {
    return PosixFileSystem().TryLock(directory);
  }

  std::atomic<int64_t> bytes_left = 0;
};

namespace fs = std::filesystem;

// Replaces the checksum of an index by the right one.
inline void Sign(nlohmann::json& index) {
  index.erase("sha256");
  Sha256 sha256;
  sha256.Add(index.dump());
  index["sha256"] = sha256.Hex();
}

inline std::string Crc32Of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  return absl::StrCat(absl::Hex(libdeflate_crc32(0, bytes.data(), bytes.size()), absl::kZeroPad8));
}

inline nlohmann::json ReadJson(const std::string& path) {
  std::ifstream in(path);
  return nlohmann::json::parse(in);
}

class CheckpointTest : public testing::Test {
 protected:
  CheckpointTest()
      : root_(fs::path(testing::TempDir()) / ("checkpoint" + std::to_string(getpid()))) {
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  ~CheckpointTest() override { fs::remove_all(root_); }

  std::string Path(const std::string& name) const { return (root_ / name).string(); }
  static JobSpec Spec(int world_size) {
    JobSpec spec = MakeJobSpec(
        {.group_sizes = {{1000, 0, 24}, {3000}}, .world_size = world_size, .chunk_elements = 512});
    spec.groups[1].hyper_parameters.amsgrad = true;
    return spec;
  }
  // The same parameters on one rank, in groups of the other order.
  static JobSpec Turned() {
    JobSpec turned = Spec(1);
    turned.name = "turned";
    std::swap(turned.groups[0], turned.groups[1]);
    for (ParameterSpec& parameter : turned.layout.parameters) parameter.group = 1 - parameter.group;
    turned.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 3072},
                                {.rank = 0, .group = 1, .begin = 0, .end = 1024}};
    return turned;
  }
  // Saves, and moves the checkpoint to `name`, as people do.
  void SaveAt(JobDriver& driver, const std::string& name) {
    const absl::StatusOr<CheckpointInfo> saved = driver.job().Save(Path("folder"));
    ASSERT_TRUE(saved.ok()) << saved.status();
    fs::remove_all(Path(name));
    fs::rename(saved->directory, Path(name));
  }
  // Loads "changed": "saved" with one element of a tensor changed, and all checksums right.
  template <class T>
  absl::Status LoadChanged(Job& job, const std::string& plane, const std::string& tensor,
                           size_t element, T value) {
    fs::remove_all(Path("changed"));
    fs::copy(Path("saved"), Path("changed"), fs::copy_options::recursive);
    const std::string path = Path("changed") + "/" + plane + ".safetensors";
    std::ifstream in(path, std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
    const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
    const size_t begin = 8 + header_bytes + header[tensor]["data_offsets"][0].get<size_t>();
    std::memcpy(bytes.data() + begin + element * sizeof(value), &value, sizeof(value));
    std::ofstream(path, std::ios::binary) << bytes;
    nlohmann::json index = ReadJson(Path("changed") + "/index.json");
    for (nlohmann::json& file : index["files"]) {
      if (file["plane"] == plane) file["crc32"] = Crc32Of(path);
    }
    Sign(index);
    std::ofstream(Path("changed") + "/index.json") << index;
    return job.Load(Path("changed")).status();
  }
  std::set<std::string> Names(const std::string& folder) const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(Path(folder))) {
      names.insert(entry.path().filename().string());
    }
    return names;
  }

  const fs::path root_;
  Engine engine_{{.memory_limit_bytes = int64_t{64} << 20, .threads = 2}};
};

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_FOR_TESTS_H_
