// Runs resample.h over random images, regions and work, also what `Check` refuses; the sanitizers watch.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "resample.h"

using namespace dali_tf_input;

int main(int, char** arguments) {
  const int rounds = std::atoi(arguments[1]);
  std::mt19937_64 random(1);
  auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % bound); };
  auto part = [&] { return std::uniform_real_distribution<double>(0, 1)(random); };
  const double odd[] = {-1, -0.5, 0, 1e-300, 0.5, 1, 1e9, 1e300, -1e300, NAN, INFINITY};
  const int kinds[][2] = {{1, 1}, {1, 900}, {900, 1}, {65500, 1}, {1, 65500}, {37, 53}, {300, 200}};
  const int sizes[] = {4, 2, 2, 1};
  long done = 0, refused = 0;
  for (int round = 0; round < rounds; ++round) {
    Image image;
    const int* kind = kinds[below(7)];
    image.height = kind[0], image.width = kind[1], image.mirror = below(2);
    std::vector<uint8_t> pixels(3 * image.height * image.width);
    for (auto& pixel : pixels) pixel = static_cast<uint8_t>(random());
    for (int axis = 0; axis < 2; ++axis) {
      const double size = static_cast<double>(kind[axis]);
      image.extent[axis] = size * part();
      image.start[axis] = (size - image.extent[axis]) * part();
      if (!below(3)) image.start[axis] = std::floor(image.start[axis]), image.extent[axis] = std::ceil(image.extent[axis]);
      if (!below(20)) image.start[axis] = odd[below(11)];
      if (!below(20)) image.extent[axis] = odd[below(11)];
    }
    Work work;
    work.height = 1 + below(below(4) ? 40 : 300), work.width = 1 + below(below(4) ? 40 : 300);
    work.kernel = static_cast<Kernel>(below(4)), work.output = static_cast<Output>(below(4));
    work.antialias = below(2), work.clip = below(2), work.chw = below(2);
    if (Check(work, image)) {
      ++refused;
      continue;
    }
    // Of its very size, so that a write beyond it is found.
    std::vector<uint8_t> out(static_cast<size_t>(3) * work.height * work.width * sizes[work.output]);
    Prepare(work, image, pixels.data(), out.data());
    const float* values = reinterpret_cast<const float*>(out.data());
    for (size_t place = 0; work.output == kFloat32 && place < out.size() / 4; ++place) {
      if (!(values[place] > -200 && values[place] < 500)) return std::printf("found %g\n", values[place]), 1;
    }
    ++done;
  }
  std::printf("%ld done, %ld refused\n", done, refused);
}
