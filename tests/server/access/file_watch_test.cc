#include "server/access/file_watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

namespace ballast::server {
namespace {

TEST(FileWatch, TellsOfFilesThatAreWrittenReplacedAndRemoved) {
  const std::string file = testing::TempDir() + "file_watch_test";
  std::ofstream(file) << "a";
  std::atomic<int> changes = 0;
  const FileWatch watch({file}, [&] { ++changes; });
  const auto await = [&](int wanted) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    while (changes < wanted && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return changes == wanted;
  };
  // Of the same size. One change and not two: the file is not made empty before.
  std::fstream(file, std::ios::in | std::ios::out) << "b";
  EXPECT_TRUE(await(1));
  std::filesystem::remove(file);
  EXPECT_TRUE(await(2));
  std::ofstream(file + ".new") << "c";
  std::filesystem::rename(file + ".new", file);
  EXPECT_TRUE(await(3));
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace ballast::server
